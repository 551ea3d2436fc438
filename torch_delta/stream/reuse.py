"""Files that a new anchor has in common with the newest one: copied inside the store instead of uploaded again.

What is equal is known from digests and hashes alone, so nothing is read for it. Every copy has a key of its own: an
anchor never leans on another one's files, and each is deleted by itself.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch_delta.errors import FormatError, ObjectNotFound, StoreError
from torch_delta.format.anchor import AnchorFile, AnchorManifest
from torch_delta.format.keys import anchor_file_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_delta.format.digest import Digest
    from torch_delta.stream.stream import Stream

_logger = logging.getLogger("torch_delta")


class Reuse:
    """Takes files over from the newest anchor of a stream.

    Args:
        stream: that the new anchor belongs to.
        version: of the new anchor.
        nonce: of the new anchor.

    Attributes:
        copied_bytes: of all files taken over so far.
    """

    def __init__(self, stream: Stream, version: int, nonce: str) -> None:
        self.copied_bytes = 0
        self._stream = stream
        self._version = version
        self._nonce = nonce
        self._before = newest_manifest(stream)
        self._tensors: dict[str, set[str]] = {}
        self._digests: dict[str, Digest] = {}
        if self._before is not None:
            for tensor, name in self._before.tensor_files.items():
                self._tensors.setdefault(name, set()).add(tensor)
            schema = stream.load()[1]
            names = (schema.tensors[index].name for index in schema.data_indices)
            self._digests = dict(zip(names, self._before.digests, strict=True))

    @property
    def is_possible(self) -> bool:
        """Whether there is an anchor to take anything from."""
        return self._before is not None

    def weights(self, name: str, digests: Mapping[str, Digest]) -> AnchorFile | None:
        """Take over the file that holds exactly these tensors with exactly these bits, under `name`; None if none does.

        Args:
            name: of the file in the new anchor.
            digests: of all its tensors, by name.
        """
        for file in self._before.files if self._before is not None else ():
            tensors = self._tensors.get(file.name, set())
            if tensors == set(digests) and all(self._digests[tensor] == digests[tensor] for tensor in digests):
                return self._copy(file, name)
        return None

    def small(self, name: str, stored_bytes: int, sha256: str) -> AnchorFile | None:
        """Take over a file without tensors by its hash; None if there is none."""
        for file in self._before.files if self._before is not None else ():
            if (file.stored_bytes, file.sha256) == (stored_bytes, sha256):
                return self._copy(file, name)
        return None

    def _copy(self, file: AnchorFile, name: str) -> AnchorFile | None:
        """Whatever stands in the way of a copy is no reason to fail: the file is uploaded then."""
        key = anchor_file_key(self._version, self._nonce, name)
        try:
            made = self._stream.store.copy(file.key, key)
        except StoreError as error:
            _logger.warning("%s is uploaded, because copying %s failed: %s", key, file.key, error)
            return None
        if made is None or made.size_bytes != file.stored_bytes:
            return None
        self.copied_bytes += file.stored_bytes
        return AnchorFile(name=name, key=key, stored_bytes=file.stored_bytes, sha256=file.sha256)


def newest_manifest(stream: Stream) -> AnchorManifest | None:
    """Of the newest anchor that can be read, or None: no stream yet, no anchor yet."""
    try:
        anchors = stream.anchors()
        stream.load()
    except ObjectNotFound:
        return None
    for anchor in reversed(anchors):
        try:
            return stream.anchor(anchor)
        except (FormatError, ObjectNotFound):
            continue
    return None
