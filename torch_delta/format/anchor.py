"""Anchors: a full copy of the state of one version, as a Hugging Face checkpoint folder with a sealed manifest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_delta.format.checks import Fields, broken, check_info, need_hex, need_int53
from torch_delta.format.digest import Digest, digests_hex
from torch_delta.format.keys import anchor_key, is_file_name, parse_anchor_file_key, parse_anchor_key, version_name
from torch_delta.format.limits import FORMAT_VERSION, MAX_ANCHOR_FILES
from torch_delta.format.sealed import seal, unseal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_delta.format.schema import Schema


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorFile:
    """One file of an anchor.

    Attributes:
        name: in the checkpoint folder a receiver writes, such as ``model-00001-of-00002.safetensors``.
        key: of the stored object, inside the anchor's folder.
        stored_bytes: its size.
        sha256: of its bytes, hex.
    """

    name: str
    key: str
    stored_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        parse_anchor_file_key(self.key)
        if not is_file_name(self.name):
            raise broken("A3", self.key, f"{self.name[:80]!r} is not a plain file name")
        need_hex(self.sha256, 64, rule="A3", key=self.key, what="sha256")
        need_int53(self.stored_bytes, rule="A3", key=self.key, what="bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorManifest:
    """The object at ``anchors/<version>-<nonce>.json``, created after all files of the anchor.

    Attributes:
        stream_id: of the stream.
        version: whose state it is; an anchor is a representation of a version, not a version.
        commit_sha256: of the stored bytes of that version's commit. For version 0: of ``stream.json``, or None if the
            anchor was written before it.
        schema_id: of the stream's schema.
        files: at least one, sorted by name.
        tensor_files: file name of every tensor that is not an alias.
        digests: of every tensor that is not an alias, in schema order.
        info: for people; no reader acts on it.
    """

    stream_id: str
    version: int
    commit_sha256: str | None
    schema_id: str
    files: tuple[AnchorFile, ...]
    tensor_files: Mapping[str, str]
    digests: tuple[Digest, ...]
    info: Mapping[str, str] = field(default_factory=dict)

    @property
    def nonce(self) -> str:
        """What tells apart several anchors of one version."""
        return parse_anchor_file_key(self.files[0].key).nonce

    @property
    def key(self) -> str:
        """Where the manifest is stored."""
        return anchor_key(self.version, self.nonce)

    def __post_init__(self) -> None:
        where = f"anchor of version {version_name(self.version)}"
        need_hex(self.stream_id, 32, rule="I2", key=where, what="stream_id")
        need_hex(self.schema_id, 64, rule="I2", key=where, what="schema")
        if not 1 <= len(self.files) <= MAX_ANCHOR_FILES:
            raise broken("A3", where, f"an anchor has 1 to {MAX_ANCHOR_FILES} files, got {len(self.files)}")
        key = self.key
        if self.commit_sha256 is not None:
            need_hex(self.commit_sha256, 64, rule="A2", key=key, what="commit_sha256")
        elif self.version > 0:
            raise broken("A2", key, "only an anchor of version 0 may leave out commit_sha256")
        self._check_files(key)
        check_info(self.info, key=key)

    def _check_files(self, key: str) -> None:
        folder = parse_anchor_key(key)
        names: set[str] = set()
        keys: set[str] = set()
        previous = ""
        for file in self.files:
            parsed = parse_anchor_file_key(file.key)
            if (parsed.version, parsed.nonce) != (folder.version, folder.nonce):
                raise broken("A3", key, f"names a file outside its own folder: {file.key}", file=file.key)
            if file.name <= previous:
                raise broken("A3", key, f"files are sorted by name, each once; {file.name} follows {previous}")
            # Folded: a file system that ignores case must not let one file replace another.
            if file.name.lower() in names or file.key.lower() in keys:
                raise broken("A3", key, f"two files differ in case only or share an object: {file.name}")
            names.add(file.name.lower())
            keys.add(file.key.lower())
            previous = file.name
        known = {file.name for file in self.files}
        for tensor, name in self.tensor_files.items():
            if name not in known:
                raise broken("A4", key, f"tensor {tensor!r} lies in {name!r}, which is not a file of the anchor")
        if len(self.tensor_files) != len(self.digests):
            raise broken("A4", key, f"{len(self.tensor_files)} tensors have a file, {len(self.digests)} have a digest")

    def check_schema(self, schema: Schema) -> None:
        """Check that the manifest covers exactly the tensors of `schema` that carry data.

        Raises:
            FormatError: rule A4 (tensors) or S1 (another schema) is broken.
        """
        if schema.id != self.schema_id:
            raise broken("S1", self.key, f"names schema {self.schema_id}, the stream has {schema.id}")
        expected = {schema.tensors[at].name for at in schema.data_indices}
        if self.tensor_files.keys() != expected:
            some = sorted(self.tensor_files.keys() ^ expected)[:5]
            raise broken("A4", self.key, f"its tensors are not those of the schema; differing: {', '.join(some)}")

    def to_bytes(self) -> bytes:
        """The stored bytes."""
        return seal(
            {
                "format_version": list(FORMAT_VERSION),
                "stream_id": self.stream_id,
                "version": self.version,
                "commit_sha256": self.commit_sha256,
                "schema": self.schema_id,
                "files": [
                    {"name": file.name, "key": file.key, "bytes": file.stored_bytes, "sha256": file.sha256}
                    for file in self.files
                ],
                "tensor_files": dict(self.tensor_files),
                "digests": digests_hex(self.digests),
                "info": dict(self.info),
            },
            key=self.key,
        )

    @classmethod
    def from_bytes(cls, data: bytes, *, key: str) -> AnchorManifest:
        """Parse stored bytes.

        Args:
            data: the stored object.
            key: where it was found; must be the key the manifest claims.

        Raises:
            FormatError: the seal or a rule is broken.
            UnsupportedFormat: another major version.
        """
        fields = Fields(unseal(data, key=key), key=key)
        fields.format_version()
        manifest = cls(
            stream_id=fields.text("stream_id"),
            version=fields.integer("version"),
            commit_sha256=fields.text_or_none("commit_sha256"),
            schema_id=fields.text("schema"),
            files=tuple(
                _file(Fields(entry, key=key, where=f"files[{at}]."))
                for at, entry in enumerate(fields.items("files", dict, max_items=MAX_ANCHOR_FILES, rule="A3"))
            ),
            tensor_files=fields.text_map("tensor_files"),
            digests=fields.digests("digests"),
            info=fields.text_map("info"),
        )
        if manifest.key != key:
            raise broken("A5", key, f"claims to be {manifest.key}")
        return manifest


def _file(fields: Fields) -> AnchorFile:
    return AnchorFile(
        name=fields.text("name"),
        key=fields.text("key"),
        stored_bytes=fields.integer("bytes"),
        sha256=fields.text("sha256"),
    )
