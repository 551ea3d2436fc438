"""What an object store's answer means: no such object, name taken, refused for good, or no clear answer."""

from __future__ import annotations

import re
from typing import Final

from torch_delta.store.calls import Answer, Language

_STATUS = re.compile(r"status code: (\d{3})")
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
# Request timeout, conflict with a request in flight, too early, too many requests.
_CLIENT_ERRORS_WORTH_REPEATING = {408, 409, 425, 429}
_SERVER_ERRORS_FOR_GOOD = {501, 505}
_METADATA_SERVICES = ("169.254.169.254", "169.254.170.2", "metadata.google.internal", "metadata/identity")
_MOST_WORDS = 300

_NO_BUCKET_ADVICE = "There is no such bucket: create it, or correct the URL, the endpoint or the region"
_FORBIDDEN_ADVICE = (
    "Access is refused: check the credentials, the clock of this machine, and that they may list the bucket and get, "
    "put and delete below the prefix (without the right to list, an absent object reads as forbidden)"
)
_CLOCK_ADVICE = "The clock of this machine is off by more than the service accepts (15 minutes): set it, then repeat"
_CREDENTIALS_ADVICE = (
    "No credentials were found: set them in the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; "
    "GOOGLE_APPLICATION_CREDENTIALS; AZURE_STORAGE_ACCOUNT_KEY), install boto3 to use ~/.aws, or give this "
    "machine a role"
)
_REGION_ADVICE = "The bucket lives elsewhere: set AWS_REGION to its region"
_REQUEST_ADVICE = "The service refuses the request: check region, endpoint and that it supports conditional writes"
_REPEAT_ADVICE = "Check network and endpoint, then repeat"


def understand(error: Exception) -> Answer:
    """Classify what obstore raised; it tells a few cases by class and the rest only in words."""
    from obstore import exceptions

    text = str(error).partition("\n\nDebug source")[0]
    found = _STATUS.search(text)
    status = int(found.group(1)) if found else None
    said = _shorten(text)
    if any(name in text for name in _METADATA_SERVICES):
        is_overloaded = status is not None and (status == 429 or status >= 500)
        return Answer("unclear" if is_overloaded else "refused", said, _CREDENTIALS_ADVICE, status)
    if "RequestTimeTooSkewed" in text:
        return Answer("refused", said, _CLOCK_ADVICE, status)
    if any(words in text for words in _NO_BUCKET):
        return Answer("no bucket", said, _NO_BUCKET_ADVICE, status)
    if isinstance(error, FileNotFoundError):
        return Answer("absent", said, "", status)
    # S3 answers 409 while another conditional write of the name is in flight: nothing is decided then.
    if isinstance(error, exceptions.AlreadyExistsError | exceptions.PreconditionError):
        is_decided = status != 409 or "BlobAlreadyExists" in text
        return Answer("taken" if is_decided else "unclear", said, _REPEAT_ADVICE, status)
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError) or status in {401, 403}:
        return Answer("refused", said, _FORBIDDEN_ADVICE, status)
    # Some services answer with the whole object instead of 416, which obstore notices and words itself.
    if status == 416 or "Wanted range starting at" in text:
        return Answer("past the end", said, "", status)
    if status in {301, 307} or "AuthorizationHeaderMalformed" in text:
        return Answer("refused", said, _REGION_ADVICE, status)
    if isinstance(error, exceptions.NotSupportedError | ValueError) or (
        status is not None
        and (400 <= status < 500 or status in _SERVER_ERRORS_FOR_GOOD)
        and status not in _CLIENT_ERRORS_WORTH_REPEATING
    ):
        return Answer("refused", said, _REQUEST_ADVICE, status)
    return Answer("unclear", said, _REPEAT_ADVICE, status)


def _shorten(text: str) -> str:
    words = " ".join(text.split())
    code = re.search(r"<Code>([^<]*)</Code>", words)
    words = words.partition("<?xml")[0].partition("<Error>")[0].rstrip(": ")
    if code:
        words = f"{words}: {code.group(1)}"
    return words if len(words) <= _MOST_WORDS else f"{words[:_MOST_WORDS]}..."


def obstore_errors() -> tuple[type[Exception], ...]:
    """All that obstore raises for a request: its own classes, FileNotFoundError, and what reading a body may add."""
    from obstore.exceptions import BaseError

    return (BaseError, OSError, ValueError)


OBSTORE: Final = Language(obstore_errors, understand)
