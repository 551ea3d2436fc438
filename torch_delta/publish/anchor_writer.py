"""One rank's hands on an anchor: staging its boxes, assembling its files, and on rank 0 sealing the whole."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_delta import crashpoints
from torch_delta.codec.digest import digest_array, digest_box
from torch_delta.errors import DigestMismatch, StoreError
from torch_delta.format.anchor import AnchorFile, AnchorManifest
from torch_delta.format.digest import Digest
from torch_delta.format.dtypes import ITEMSIZE
from torch_delta.format.keys import anchor_file_key, is_file_name
from torch_delta.publish.anchor_bytes import HashedStream, Window, safetensors_header

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch_delta.capture.source import Region
    from torch_delta.format.box import Box
    from torch_delta.publish.anchor_job import AnchorJob, AnchorSource, AnchorState, FilePlan
    from torch_delta.publish.anchor_sharing import Shared

_logger = logging.getLogger("torch_delta")
_WINDOW_BYTES = 256 << 20  # shared by the objects a file is read from
_SMALLEST_WINDOW_BYTES = 1 << 20
_INDEX = "model.safetensors.index.json"
_SHOWN = 8


class AnchorWriter:
    """One rank's work on one anchor."""

    def __init__(
        self,
        job: AnchorJob,
        source: AnchorSource,
        *,
        version: int,
        plan: list[FilePlan],
        owned: Sequence[Sequence[tuple[int, Box]]],
        shared: Shared,
    ) -> None:
        self._job = job
        self._source = source
        self._schema = job.source.schema
        self._version = version
        self._nonce = shared.nonce
        self._shared = shared
        self._own_digests: dict[int, Digest] = {}  # of this rank's boxes of shared files
        self._plan = plan
        self._owned = owned
        self._staged: list[str] = []
        self.staged_bytes = 0
        self.assemble_s = 0.0

    def stage(self) -> bytes:
        """Write this rank's boxes of other ranks' files; each object holds them one after the other, in owned order."""
        rank = self._job.team.rank
        file_of = {tensor: number for number, file in enumerate(self._plan) for tensor in file.tensors}
        regions = self._source.regions()
        wanted = [(file_of[tensor], tensor) for tensor, _ in self._owned[rank]]

        # Files are runs of the schema's order, which is also the order of the regions: one pass serves all of them.
        region = next(regions, None)
        for number in sorted({number for number, _ in wanted}):

            def pieces(number: int = number) -> Iterator[bytes]:
                nonlocal region
                while region is not None and file_of[region.tensor] == number:
                    yield region.bits.tobytes()
                    region = next(regions, None)

            if number in self._shared.numbers:
                while region is not None and file_of[region.tensor] == number:
                    self._digest(region)
                    region = next(regions, None)
                continue
            if self._plan[number].owner == rank:
                for _ in pieces():
                    pass
                continue
            key = self._stage_key(rank, number)
            self._staged.append(key)
            self.staged_bytes += self._job.store.put_new(key, pieces()).size_bytes
        crashpoints.reach("publish.anchor_staged")
        return b""

    def assemble(self) -> bytes:
        """Write the files this rank owns; tells rank 0 their facts and the digests of their tensors."""
        started = time.perf_counter()
        files = []
        digests: dict[int, str] = {}
        for number, file in enumerate(self._plan):
            if file.owner != self._job.team.rank or number in self._shared.numbers:
                continue
            stream = HashedStream(self._file_pieces(number, file, digests))
            key = anchor_file_key(self._version, self._nonce, file.name)
            stored_bytes = self._job.store.put_new(key, stream).size_bytes
            crashpoints.reach("publish.anchor_file_put")
            files.append(
                asdict(AnchorFile(name=file.name, key=key, stored_bytes=stored_bytes, sha256=stream.sha256.hexdigest()))
            )
        self.assemble_s = time.perf_counter() - started
        partial = {tensor: digest.hex() for tensor, digest in self._own_digests.items()}
        return json.dumps({"files": files, "digests": digests, "partial": partial}).encode()

    def seal(self, payloads: list[bytes], state: AnchorState | None) -> bytes:
        """Rank 0: check everything, write the small files and last the manifest."""
        assert state is not None
        told = [json.loads(payload) for payload in payloads]
        found = {int(tensor): digest for one in told for tensor, digest in one["digests"].items()}
        found |= self._of_shared(told)
        wrong = [
            self._schema.tensors[tensor].name
            for tensor, digest in zip(self._schema.data_indices, state.digests, strict=True)
            if found.get(tensor) != digest.hex()
        ]
        if wrong:
            raise DigestMismatch(
                f"the shards the ranks hold are not version {self._version}: {len(wrong)} tensors differ "
                f"({', '.join(wrong[:_SHOWN])}); the anchor was not written",
                version=self._version,
                tensor=wrong[0],
                tensors=wrong[:100],
            )
        files = [*self._shared.files, *(AnchorFile(**file) for one in told for file in one["files"])]
        files += [self._put_small(name, data) for name, data in sorted(self._small_files().items())]
        manifest = AnchorManifest(
            stream_id=state.stream_id,
            version=self._version,
            commit_sha256=state.commit_sha256,
            schema_id=self._schema.id,
            files=tuple(sorted(files, key=lambda file: file.name)),
            tensor_files={self._schema.tensors[t].name: file.name for file in self._plan for t in file.tensors},
            digests=tuple(state.digests),
            info={"writer": "torch_delta"},
        )
        manifest.check_schema(self._schema)
        self._job.store.create_or_same(manifest.key, manifest.to_bytes())
        crashpoints.reach("publish.anchor_manifest_put")
        reuse = self._shared.reuse
        done = {
            "key": manifest.key,
            "num_files": len(files),
            "stored_bytes": sum(file.stored_bytes for file in files),
            "copied_bytes": 0 if reuse is None else reuse.copied_bytes,
        }
        return json.dumps(done).encode()

    def clean_up(self) -> None:
        """Remove what this rank staged; what cannot be removed is swept later."""
        for key in self._staged:
            try:
                self._job.store.delete(key)
            except StoreError as error:
                _logger.warning("staged object %s was not removed: %s", key, error)

    def _digest(self, region: Region) -> None:
        shape = self._schema.tensors[region.tensor].shape
        digest = digest_box(region.bits.reshape(region.box.shape), region.box, shape)
        known = self._own_digests.get(region.tensor)
        self._own_digests[region.tensor] = digest if known is None else known + digest

    def _of_shared(self, told: Sequence[Mapping[str, Any]]) -> dict[int, str]:
        """Digests of the tensors of shared files, from all ranks' boxes; a tensor in no model is the base's."""
        found: dict[int, Digest] = {}
        for one in told:
            for tensor, digest in one["partial"].items():
                known = found.get(int(tensor), Digest.ZERO)
                found[int(tensor)] = known + Digest.from_bytes(bytes.fromhex(digest))
        in_models = {tensor for boxes in self._owned for tensor, _ in boxes}
        for number in self._shared.numbers:
            for tensor in self._plan[number].tensors:
                if tensor not in in_models:
                    found[tensor] = digest_array(self._tensor(tensor, {}))
        return {tensor: digest.hex() for tensor, digest in found.items()}

    def _stage_key(self, rank: int, number: int) -> str:
        return anchor_file_key(self._version, self._nonce, f"stage-{rank:05d}-{number:05d}")

    def _file_pieces(self, number: int, file: FilePlan, digests: dict[int, str]) -> Iterator[Any]:
        """The bytes of one safetensors file; leaves the digest of every tensor it passes."""
        yield safetensors_header(self._schema, file.tensors)
        sources = self._sources(number, file)
        for tensor in file.tensors:
            bits = self._tensor(tensor, sources)
            digests[tensor] = digest_array(bits).hex()
            yield bits.data.cast("B")

    def _tensor(self, tensor: int, sources: Mapping[int, Sequence[_BoxSource]]) -> np.ndarray[Any, Any]:
        spec = self._schema.tensors[tensor]
        dtype = np.dtype(f"<u{ITEMSIZE[spec.dtype]}")
        if tensor not in sources and self._job.base is not None and spec.numel:
            # In no model, so in the base and never changed.
            _, bits = next(iter(self._job.base.bits([spec.name])))
            return np.ascontiguousarray(bits).copy()
        full = np.empty(spec.shape, dtype)
        for part in sources.get(tensor, ()):
            at = tuple(slice(o, o + n) for o, n in zip(part.box.offset, part.box.shape, strict=True))
            if part.window is None:
                full[at] = self._source.read(tensor, part.box).reshape(part.box.shape)
            else:
                data = part.window.read(part.start, part.box.numel * dtype.itemsize)
                full[at] = np.frombuffer(data, dtype).reshape(part.box.shape)
        return full.reshape(-1)

    def _sources(self, number: int, file: FilePlan) -> dict[int, list[_BoxSource]]:
        """Where each box of the file's tensors comes from: this rank's source, or a place in a staged object."""
        inside = set(file.tensors)
        window_bytes = max(_WINDOW_BYTES // self._job.team.world_size, _SMALLEST_WINDOW_BYTES)
        found: dict[int, list[_BoxSource]] = {}
        for rank, boxes in enumerate(self._owned):
            window = None
            position = 0
            for tensor, box in boxes:
                if tensor not in inside:
                    continue
                if window is None and rank != self._job.team.rank:
                    window = Window(self._job.store, self._stage_key(rank, number), window_bytes)
                found.setdefault(tensor, []).append(_BoxSource(box, window, position))
                position += box.numel * ITEMSIZE[self._schema.tensors[tensor].dtype]
            if window is not None:
                window.size_bytes = position
        return found

    def _small_files(self) -> dict[str, bytes]:
        files = dict(self._job.extra_files)
        if self._job.base is not None:
            files.update({path.name: path.read_bytes() for path in self._job.base.small_files()})
        if len(self._plan) > 1:
            total = sum(self._schema.tensors[tensor].nbytes for tensor in self._schema.data_indices)
            weight_map = {self._schema.tensors[t].name: file.name for file in self._plan for t in file.tensors}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            files[_INDEX] = json.dumps(index, indent=2).encode()
        return {name: data for name, data in files.items() if is_file_name(name)}

    def _put_small(self, name: str, data: bytes) -> AnchorFile:
        sha256 = hashlib.sha256(data).hexdigest()
        if self._shared.reuse is not None and (file := self._shared.reuse.small(name, len(data), sha256)) is not None:
            return file
        key = anchor_file_key(self._version, self._nonce, name)
        self._job.store.put_new(key, data)
        return AnchorFile(name=name, key=key, stored_bytes=len(data), sha256=sha256)


@dataclass(frozen=True, slots=True)
class _BoxSource:
    box: Box
    window: Window | None
    """None: this rank owns the box."""
    start: int
    """First byte in the staged object."""
