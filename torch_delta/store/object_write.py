"""Creating objects in a bucket: one conditional request where it fits, a streamed upload where it does not.

Every object carries a nonce of its put in its metadata (`NONCE`). After any reply that is not a clear success we read
it back: our nonce is proof that the object is this call's, another nonce is proof that it is not.

*Conditional*: ``put(mode="create")``, which the service decides atomically (S3 ``If-None-Match: *``, GCS generation
match 0, Azure ``If-None-Match``). It may be repeated with the same nonce as often as needed.

*Streamed*: obstore's multipart upload has no precondition, so we look first, upload, and read back. Two writers of one
name could both pass the look; that is why a name without a nonce is refused here (`need_nonce`).
"""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING

from torch_delta.errors import ObjectNotFound, StoreUnavailable
from torch_delta.store.base import ObjectInfo
from torch_delta.store.calls import Answer
from torch_delta.store.keycheck import need_nonce
from torch_delta.store.object_answers import obstore_errors, understand
from torch_delta.store.object_read import NONCE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch_delta.store.calls import Call
    from torch_delta.store.object_config import Client, ObjectConfig
    from torch_delta.store.object_read import Reader

_NOT_THERE = Answer("unclear", "it was copied, and is not there", "Repeat", None)


class Writer:
    """The two ways to create an object.

    Args:
        conditional: client without retries of its own.
        uploader: client that repeats single chunks, which is always safe.
        reader: reads back.
        config: limits.
    """

    def __init__(self, *, conditional: Client, uploader: Client, reader: Reader, config: ObjectConfig) -> None:
        self._conditional = conditional
        self._uploader = uploader
        self._reader = reader
        self._config = config

    def create(self, call: Call, data: bytes) -> ObjectInfo:
        """Create an object by one conditional request, repeated until the outcome is known.

        Raises:
            ObjectExists: another put made it.
            StoreUnavailable: refused, or unknown at the deadline.
        """
        import obstore

        nonce = secrets.token_hex(16)
        may_be_there = False  # whether an attempt of ours may have landed, or may still land
        while True:
            call.start_attempt()
            try:
                obstore.put(
                    self._conditional, call.key, data, mode="create", attributes={NONCE: nonce}, use_multipart=False
                )
                return ObjectInfo(call.key, len(data))
            except obstore_errors() as error:
                answer = understand(error)
                if answer.kind == "taken":
                    if not may_be_there:
                        raise call.exists() from error
                elif answer.kind != "unclear":
                    raise call.unavailable(answer, outcome="unknown" if may_be_there else "absent") from error
                may_be_there = True
                if self._is_ours(call, nonce, error, answer):
                    return ObjectInfo(call.key, len(data))
                call.wait(error, answer)

    def _is_ours(self, call: Call, nonce: str, error: Exception, answer: Answer) -> bool:
        """Whether the object proves to be this call's; False if there is none yet, or no answer.

        Raises:
            ObjectExists: it proves to be another's.
            StoreUnavailable: it is there without a nonce, so there is no proof of either.
        """
        try:
            _, found = self._reader.look(call)
        except (ObjectNotFound, StoreUnavailable):
            # Absent is no proof of failure, the request may still be on its way; the next attempt has our nonce, too.
            return False
        if found == nonce:
            return True
        if found is None:
            raise call.unavailable(answer, outcome="unknown") from error
        raise call.exists() from error

    def stream(self, call: Call, pieces: Iterable[bytes]) -> ObjectInfo:
        """Upload in chunks and make visible at the end. `pieces` must not change after they were handed over.

        Raises:
            ValueError: the name holds no nonce, so that another writer might use it.
            ObjectExists: the name was taken before, or the object there at the end is another put's.
            StoreUnavailable: refused, or no answer.
            BaseException: what `pieces` raised; the upload is aborted then.
        """
        import obstore

        need_nonce(call.url, call.key, call.operation)
        call.outcome = "absent"
        try:
            self._reader.look(call)
        except ObjectNotFound:
            pass
        else:
            raise call.exists()
        call = call.again()
        call.outcome = "unknown"
        nonce = secrets.token_hex(16)
        size_bytes = 0
        is_complete = False  # all bytes are handed over: from here on the object may appear
        is_sending = False  # an error now is the network's, not the caller's iterable's
        try:
            with obstore.open_writer(
                self._uploader,
                call.key,
                attributes={NONCE: nonce},
                buffer_size=self._config.chunk_bytes,
                max_concurrency=self._config.num_parallel,
            ) as upload:
                for piece in pieces:
                    is_sending = True
                    upload.write(piece)
                    is_sending = False
                    size_bytes += len(piece)
                is_complete = is_sending = True
        except obstore_errors() as error:
            if not is_sending:
                raise
            answer = understand(error)
            if not is_complete or answer.kind == "refused":
                raise call.unavailable(answer, outcome="absent") from error
            return self._read_back(call, nonce, size_bytes, (error, answer))
        return self._read_back(call, nonce, size_bytes, None)

    def copy(self, source: Call, call: Call) -> ObjectInfo | None:
        """Have the service copy an object, metadata and so the nonce of its put included; repeated until it is there.

        No service but Azure and Google offers a condition for it that all of them honour, so the name is looked up
        first, and must be one that nobody else uses.

        Args:
            source: an operation on the object to copy.
            call: the operation on the new name.

        Returns:
            Facts of the new object, or None if the service refuses.

        Raises:
            ValueError: the new name holds no nonce.
            ObjectNotFound: there is no source.
            ObjectExists: the name is taken.
            StoreUnavailable: no clear answer.
        """
        import obstore

        need_nonce(call.url, call.key, call.operation)
        wanted, nonce = self._reader.look(source)
        try:
            self._reader.look(call)
        except ObjectNotFound:
            pass
        else:
            raise call.exists()
        call = call.again()
        call.outcome = "unknown"
        while True:
            call.start_attempt()
            failure, answer = None, _NOT_THERE
            try:
                obstore.copy(self._conditional, source.key, call.key, overwrite=True)
            except obstore_errors() as error:
                failure, answer = error, understand(error)
                if answer.kind == "absent":
                    raise source.not_found() from error
                if answer.kind != "unclear":
                    return None
            with contextlib.suppress(ObjectNotFound):
                info, found = self._reader.look(call)
                if info.size_bytes == wanted.size_bytes and found == nonce:
                    return info
            call.wait(failure, answer)

    def _read_back(
        self, call: Call, nonce: str, size_bytes: int, trouble: tuple[Exception, Answer] | None
    ) -> ObjectInfo:
        """Whether the object there is the one just uploaded.

        Args:
            call: the put.
            nonce: of the put.
            size_bytes: what was uploaded.
            trouble: error of the request that completes the upload and its meaning, or None if it said yes.
        """
        error = trouble[0] if trouble is not None else None
        try:
            info, found = self._reader.look(call.again())  # uploading may have taken all the time
        except ObjectNotFound as absent:
            said = Answer("unclear", "the finished upload is not there", "Repeat under a fresh name", None)
            raise call.unavailable(said if trouble is None else trouble[1]) from (absent if error is None else error)
        # A service that keeps no metadata and said yes is believed; one whose reply was lost is not.
        is_ours = found == nonce or (found is None and error is None)
        if is_ours and info.size_bytes == size_bytes:
            return info
        if found is not None and found != nonce:
            raise call.exists() from error
        said = Answer("unclear", f"{info.size_bytes} bytes are stored, {size_bytes} were sent", "Repeat", None)
        raise call.unavailable(said if trouble is None else trouble[1]) from error
