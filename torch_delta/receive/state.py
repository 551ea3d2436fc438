"""What a working copy is: the sealed records under its hidden folder, and where they lie.

    <checkpoint>/.torch_delta/
      state.json        the version the weights are at, with the digest of every tensor
      next.json         the state being moved to; present only while weights change (crash marker)
      install.json      a staged set of files being moved into place (crash marker)
      schema.json       the stream's schema object, as stored in the stream
      patches/<version>.safetensors          absolute patches, kept as redo log and for consumers
      patches/<version>-<since>.safetensors  the same for several versions in one
      consumers/        who on this host still needs which patch
      stage-*/, tmp/    unfinished work; whatever lies here when the writer lock is free is garbage

A state file is always synced under another name first and becomes current by a rename, so any crash leaves a whole one.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from torch_delta.errors import FormatError
from torch_delta.format.digest import Digest, digests_hex, parse_digests_hex
from torch_delta.format.keys import version_name
from torch_delta.format.schema import Schema
from torch_delta.format.sealed import seal, unseal
from torch_delta.receive.diskio import local_io

if TYPE_CHECKING:
    from collections.abc import Mapping

HIDDEN = ".torch_delta"
_FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Layout:
    """Paths of the hidden folder of the checkpoint at `root`."""

    root: Path

    @property
    def hidden(self) -> Path:
        """The hidden folder itself."""
        return self.root / HIDDEN

    @property
    def state(self) -> Path:
        """The current state."""
        return self.hidden / "state.json"

    @property
    def next(self) -> Path:
        """The state a writer is moving to."""
        return self.hidden / "next.json"

    @property
    def install(self) -> Path:
        """The file set a writer is moving into place."""
        return self.hidden / "install.json"

    @property
    def schema(self) -> Path:
        """The stream's schema."""
        return self.hidden / "schema.json"

    @property
    def patches(self) -> Path:
        """Folder of absolute patches."""
        return self.hidden / "patches"

    @property
    def consumers(self) -> Path:
        """Folder of registered consumers."""
        return self.hidden / "consumers"

    @property
    def tmp(self) -> Path:
        """Folder of unfinished files."""
        return self.hidden / "tmp"

    @property
    def writer_lock(self) -> Path:
        """Held by the one process that downloads and writes."""
        return self.hidden / "writer.lock"

    @property
    def turnstile_lock(self) -> Path:
        """Passed by readers on their way in, held by a writer that waits for them to leave."""
        return self.hidden / "turnstile.lock"

    @property
    def weights_lock(self) -> Path:
        """Shared by readers of the weight files, exclusive while they change."""
        return self.hidden / "weights.lock"

    def patch(self, version: int, since: int | None = None) -> Path:
        """The absolute patch that leads to `version`, from `since` or from the version before."""
        stem = version_name(version)
        if since is not None and since != version - 1:
            stem += f"-{version_name(since)}"
        return self.patches / f"{stem}.safetensors"


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """The state of a working copy that follows a stream.

    Attributes:
        stream_id: which stream.
        version: which version the weight files hold.
        commit_sha256: of the stored bytes of that version's commit (of ``stream.json`` for version 0).
        schema_id: of ``schema.json``.
        digests: of every tensor that is not an alias, in schema order.
        synced_version: newest version whose weights would survive a power cut; later patches are the redo log.
        boot_id: the boot of the machine that wrote this state; another one means the page cache was lost.
        patch_hash: of the patch that leads to this version; empty for version 0 and after an anchor.
        patch_since: version that patch leads from; -1 for the one before.
        shared_extents: weight files were cloned copy-on-write, so that writing to them takes free blocks.
        damage: why the weight files can no longer be trusted; empty when they can.
    """

    stream_id: str
    version: int
    commit_sha256: str
    schema_id: str
    digests: tuple[Digest, ...]
    synced_version: int
    boot_id: str
    patch_hash: str = ""
    patch_since: int = -1
    shared_extents: bool = False
    damage: str = ""

    def to_bytes(self) -> bytes:
        """The sealed record."""
        fields: dict[str, object] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields["digests"] = digests_hex(self.digests)
        fields["format_version"] = _FORMAT_VERSION
        return seal(fields, key="state.json")

    @classmethod
    def from_bytes(cls, data: bytes, path: Path) -> State:
        """Read a sealed record; `path` is for the message.

        Raises:
            FormatError: damaged, or written by a newer release.
        """
        try:
            return cls.from_fields(unseal(data, key=str(path)), path)
        except FormatError as error:
            raise FormatError(
                f"{error.message}. This file says which version the folder holds; start again in an empty folder",
                **error.facts,
            ) from error

    @classmethod
    def from_fields(cls, fields: Mapping[str, object], path: Path) -> State:
        """The same from already unsealed fields."""
        got = fields.get("format_version")
        if got != _FORMAT_VERSION:
            raise FormatError(
                f"{path}: written by another release (state format {got!r}, expected {_FORMAT_VERSION}); "
                "use that release or start in an empty folder",
                key=path.name,
            )
        values: dict[str, object] = {}
        for field in dataclasses.fields(cls):
            value = fields.get(field.name, field.default)
            if field.name != "digests" and type(value).__name__ != field.type:
                raise FormatError(f"{path}: {field.name} is {value!r}, expected {field.type}", key=path.name)
            values[field.name] = value
        values["digests"] = parse_digests_hex(str(values["digests"]))
        return cls(**values)  # type: ignore[arg-type]


def boot_id() -> str:
    """Identifies this boot of this machine; empty where the system does not say (then a restart is assumed)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def read_schema(layout: Layout, state: State) -> Schema:
    """The schema of the stream that a bound checkpoint follows.

    Raises:
        FormatError: the stored copy is damaged.
        StoreUnavailable: it could not be read.
    """
    with local_io(layout.schema, "read the schema"):
        return Schema.from_bytes(layout.schema.read_bytes(), schema_id=state.schema_id)


def unbound_state(*, shared_extents: bool) -> State:
    """The state of whole weight files that follow no stream yet."""
    return State(
        stream_id="",
        version=0,
        commit_sha256="",
        schema_id="",
        digests=(),
        synced_version=0,
        boot_id=boot_id(),
        shared_extents=shared_extents,
    )
