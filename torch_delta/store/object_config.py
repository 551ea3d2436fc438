"""From a bucket URL to obstore clients: the limits, the endpoint, and where credentials come from."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from torch_delta.errors import TorchDeltaError

if TYPE_CHECKING:
    from obstore.store import AzureStore, ClientConfig, GCSStore, RetryConfig, S3Config, S3Store

    Client = S3Store | GCSStore | AzureStore

SCHEMES: Final = ("s3", "gs", "az")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")
_SEGMENT = re.compile(r"[A-Za-z0-9_=+@-][A-Za-z0-9._=+@-]*")
# The first one set wins, in the order of the ecosystem's own tools.
_ENDPOINT_VARIABLES: Final = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_ALLOW_HTTP_VARIABLE: Final = {"s3": "AWS_ALLOW_HTTP", "gs": "GOOGLE_ALLOW_HTTP", "az": "AZURE_ALLOW_HTTP"}
# Any of these means that the environment itself names credentials, which then come before files and profiles.
_AWS_IN_ENVIRONMENT: Final = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectConfig:
    """Limits of one object store. The defaults suit links from about 1 MB/s to 10 GB/s."""

    endpoint: str | None = None
    """Where the service listens, ``"https://host:port"``. None: the environment's endpoint variable, else the cloud."""
    allow_http: bool = False
    """Send unencrypted requests to a host that is not this machine. The scheme's ``..._ALLOW_HTTP=true`` does the
    same."""
    connect_timeout_s: float = 5.0
    """Longest time to open a connection, seconds."""
    stall_timeout_s: float = 20.0
    """A download that brings no byte for this long is cut and repeated, seconds."""
    request_timeout_s: float = 60.0
    """Longest time for one request with its body, seconds. With `chunk_bytes` it sets the slowest usable link."""
    operation_timeout_s: float = 120.0
    """No attempt of an operation starts later than this after its call, seconds. One that then runs may still take
    `request_timeout_s`. A streamed upload may take longer while its chunks arrive: this then bounds each chunk."""
    chunk_bytes: int = 8 << 20
    """Size of one request of a larger upload or download, bytes. S3 takes at most 10,000 chunks per object."""
    num_parallel: int = 4
    """Chunks in flight per upload; each is held in memory."""
    num_parallel_reads: int = 8
    """Threads for all chunked downloads of this store together."""
    single_put_bytes: int = 64 << 20
    """Bytes objects and tuples up to this size are created by one conditional request; what is larger, and other
    iterables above `chunk_bytes`, is streamed."""

    def __post_init__(self) -> None:
        for name in ("connect_timeout_s", "stall_timeout_s", "request_timeout_s", "operation_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"expected {name} > 0, got {getattr(self, name)}")
        if self.chunk_bytes < 5 << 20:
            raise ValueError(
                f"expected chunk_bytes of at least 5 MiB (S3 refuses smaller ones), got {self.chunk_bytes}"
            )
        for name in ("num_parallel", "num_parallel_reads"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}")
        if self.single_put_bytes < self.chunk_bytes:
            raise ValueError(f"expected single_put_bytes >= chunk_bytes, got {self.single_put_bytes}")


@dataclass(frozen=True, slots=True)
class Location:
    """A parsed bucket URL.

    Attributes:
        scheme: ``"s3"``, ``"gs"`` or ``"az"``.
        bucket: bucket or container.
        prefix: folder of the store in it, without slashes at its ends; may be empty.
    """

    scheme: str
    bucket: str
    prefix: str

    @property
    def url(self) -> str:
        """The canonical spelling."""
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")


def parse_url(text: str) -> Location:
    """Take ``s3://bucket/some/prefix`` apart.

    Raises:
        TorchDeltaError: it is malformed; the message leaves out what might be a secret.
    """
    scheme, _, rest = text.partition("://")
    scheme = scheme.lower()
    if scheme not in SCHEMES:
        raise TorchDeltaError(f"expected a URL of {', '.join(SCHEMES)}, got {scheme!r}", scheme=scheme)
    bucket, _, prefix = rest.partition("/")
    if "@" in bucket:
        raise TorchDeltaError(
            f"{scheme}://...: credentials do not belong into a URL; set them in the environment", scheme=scheme
        )
    prefix = prefix.removesuffix("/")
    if not _BUCKET.fullmatch(bucket) or not all(
        _SEGMENT.fullmatch(segment) for segment in (prefix.split("/") if prefix else [])
    ):
        raise TorchDeltaError(
            f"not a store URL: {text!r}: expected {scheme}://bucket/prefix; a prefix has letters, digits and "
            "any of . _ = + @ - in segments that do not start with a dot, joined by single slashes",
            url=text,
            scheme=scheme,
        )
    return Location(scheme, bucket, prefix)


def endpoint_of(scheme: str, config: ObjectConfig) -> str | None:
    """The custom endpoint in force, or None for the cloud's own."""
    if config.endpoint is not None:
        return config.endpoint
    return next((os.environ[name] for name in _ENDPOINT_VARIABLES[scheme] if os.environ.get(name)), None)


def make_client(location: Location, config: ObjectConfig, *, is_reading: bool, num_retries: int) -> Client:
    """An obstore client. No request is sent.

    Args:
        location: the bucket and folder; the folder becomes the client's own prefix.
        config: limits.
        is_reading: detect stalls; not for uploads, where the reply rightly comes only after the whole body.
        num_retries: repetitions inside obstore. 0 wherever we repeat ourselves, because only we know what is safe.

    Raises:
        TorchDeltaError: obstore or boto3 is missing, the endpoint is refused, or obstore refuses the settings.
    """
    try:
        from obstore.exceptions import BaseError
        from obstore.store import AzureStore, GCSStore, S3Store
    except ImportError as error:
        raise TorchDeltaError(
            f"{location.url}: object stores need obstore: pip install 'torch-delta[s3]'", url=location.url
        ) from error
    endpoint = endpoint_of(location.scheme, config)
    options: ClientConfig = {
        "allow_http": _may_use_http(location, endpoint, config),
        "connect_timeout": timedelta(seconds=config.connect_timeout_s),
        "timeout": timedelta(seconds=config.request_timeout_s),
    }
    if is_reading:
        options["read_timeout"] = timedelta(seconds=config.stall_timeout_s)
    retries: RetryConfig = {
        "max_retries": num_retries,
        "retry_timeout": timedelta(seconds=config.operation_timeout_s),
        "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=5), "base": 2},
    }
    shared: dict[str, Any] = {
        "prefix": location.prefix or None,
        "client_options": options,
        "retry_config": retries,
    }
    try:
        match location.scheme:
            case "s3":
                provider = _aws_credentials(location)
                if provider is not None:
                    shared["credential_provider"] = provider
                return S3Store(location.bucket, config=_s3_settings(endpoint), **shared)
            case "gs":
                return GCSStore(location.bucket, config={"base_url": endpoint} if endpoint else {}, **shared)
            case _:
                return AzureStore(location.bucket, config={"endpoint": endpoint} if endpoint else {}, **shared)
    except (BaseError, ValueError, OSError) as error:
        said = str(error).partition("\n")[0]
        raise TorchDeltaError(f"{location.url}: obstore refuses the settings: {said}", url=location.url) from error


def _s3_settings(endpoint: str | None) -> S3Config:
    """What the ecosystem's variables do not say.

    Signing a body means to hash it a second time. It guards against damage on the way, as TLS does, and the loopback
    has no way: where either is so it is left out, unless the environment says how it is to be.
    """
    settings: S3Config = {"endpoint": endpoint} if endpoint else {}
    parts = urlsplit(endpoint) if endpoint else None
    is_safe = parts is None or parts.scheme == "https" or is_loopback(parts.hostname or "")
    if is_safe and not os.environ.get("AWS_UNSIGNED_PAYLOAD"):
        settings["unsigned_payload"] = True
    return settings


def _may_use_http(location: Location, endpoint: str | None, config: ObjectConfig) -> bool:
    if endpoint is None:
        return location.scheme == "az" and _is_set("AZURE_STORAGE_USE_EMULATOR")
    parts = urlsplit(endpoint)
    if parts.username is not None or parts.scheme not in {"http", "https"} or not parts.hostname:
        raise TorchDeltaError(
            f"{location.url}: expected an endpoint https://host[:port] without credentials", url=location.url
        )
    if parts.scheme == "https" or is_loopback(parts.hostname):
        return parts.scheme == "http"
    variable = _ALLOW_HTTP_VARIABLE[location.scheme]
    if config.allow_http or _is_set(variable):
        return True
    raise TorchDeltaError(
        f"{location.url}: the endpoint {endpoint} would send weights unencrypted. Use https, or set {variable}=true "
        "if the network is trusted",
        url=location.url,
        endpoint=endpoint,
    )


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in {"1", "true", "yes", "on"}


def _aws_credentials(location: Location) -> Any | None:
    """What ~/.aws and profiles say, through boto3; None leaves environment and instance role to obstore."""
    if any(os.environ.get(name) for name in _AWS_IN_ENVIRONMENT) or _is_set("AWS_SKIP_SIGNATURE"):
        return None
    if importlib.util.find_spec("boto3") is None:
        if os.environ.get("AWS_PROFILE"):
            raise TorchDeltaError(
                f"{location.url}: AWS_PROFILE is set, and profiles are read through boto3: pip install boto3, or set "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
                url=location.url,
            )
        return None
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return Boto3CredentialProvider()
    except ValueError:  # boto3 found none
        return None
    except Exception as error:  # botocore's own classes: no such profile, a file it cannot read
        raise TorchDeltaError(
            f"{location.url}: boto3 cannot read the credentials: {error}. Check AWS_PROFILE and ~/.aws",
            url=location.url,
        ) from error
