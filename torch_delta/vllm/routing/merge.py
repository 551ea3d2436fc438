"""Patches of consecutive versions as one set of elements per tensor: each element once, the last write wins.

Everything a patch says is checked here, before anything else looks at it: an index outside a tensor is a crash of the
whole process on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from torch_delta.codec.bits import Bits, bits_dtype
from torch_delta.codec.geometry import Layout
from torch_delta.errors import FormatError
from torch_delta.format.box import check_disjoint, covers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_delta.format.schema import TensorSpec
    from torch_delta.receive.patches import PatchSlice


class Changes(NamedTuple):
    """What happens to one tensor.

    Attributes:
        positions: flat in the full tensor, strictly increasing, int64; None for every element.
        values: unsigned bits, `[len(positions)]` or `[numel]`.
    """

    positions: npt.NDArray[np.int64] | None
    values: Bits

    @property
    def num_changed(self) -> int:
        """Elements that are set."""
        return int(self.values.size)


def merge_changes(spec: TensorSpec, versions: Sequence[Sequence[PatchSlice]]) -> Changes:
    """Merge what consecutive versions do to one tensor.

    Args:
        spec: of the tensor.
        versions: slices per version, in version order; a version that does not touch the tensor may be left out.

    Returns:
        The merged changes; they may be views of the patches.

    Raises:
        FormatError: positions out of range, out of order or twice, boxes that overlap or do not fit, wrong counts.
    """
    for slices in versions:
        _check(spec, slices)
    whole = max((at for at, slices in enumerate(versions) if _is_whole(spec, slices)), default=None)
    if whole is None:
        return _merge_sparse([part for slices in versions for part in _flat(spec, slices)], spec)
    later = [part for slices in versions[whole + 1 :] for part in _flat(spec, slices)]
    values = _assemble(spec, versions[whole], copy=bool(later))
    for positions, new in later:
        values[positions] = new
    return Changes(None, values)


def _check(spec: TensorSpec, slices: Sequence[PatchSlice]) -> None:
    expected = bits_dtype(spec.dtype)
    for box, positions, value in slices:
        if not box.fits(spec.shape):
            raise _refused(spec, f"a slice has the box {box.offset} {box.shape} outside the shape {spec.shape}")
        if value.dtype != expected or value.ndim != 1:
            raise _refused(spec, f"a slice has values of {value.dtype}, {spec.dtype} has elements of {expected}")
        count = box.numel if positions is None else len(positions)
        if value.size != count:
            raise _refused(spec, f"a slice has {value.size} values for {count} positions")
        if positions is None or not count:
            continue
        if positions.dtype.kind not in "iu" or positions.ndim != 1:
            raise _refused(spec, f"positions are 1-D integers, got {positions.dtype}")
        if not bool((positions[1:] > positions[:-1]).all()):
            raise _refused(spec, "positions of a slice do not increase strictly: out of order, or one twice")
        if int(positions[0]) < 0 or int(positions[-1]) >= box.numel:
            outside = positions[0] if int(positions[0]) < 0 else positions[-1]
            raise _refused(spec, f"position {int(outside)} lies outside a box of {box.numel} elements")
    check_disjoint([one.box for one in slices], name=spec.name)


def _refused(spec: TensorSpec, what: str) -> FormatError:
    return FormatError(
        f"patch of tensor {spec.name!r}: {what}; nothing was written. Prepare the version again", tensor=spec.name
    )


def _is_whole(spec: TensorSpec, slices: Sequence[PatchSlice]) -> bool:
    return all(one.positions is None for one in slices) and covers([one.box for one in slices], spec.shape)


def _assemble(spec: TensorSpec, slices: Sequence[PatchSlice], *, copy: bool) -> Bits:
    """The whole tensor, flat, from boxes that cover it."""
    if len(slices) == 1:
        return slices[0].value.copy() if copy else slices[0].value
    values = np.empty(spec.shape, bits_dtype(spec.dtype))
    for box, _, value in slices:
        where = tuple(slice(at, at + extent) for at, extent in zip(box.offset, box.shape, strict=True))
        values[where] = value.reshape(box.shape)
    return values.reshape(-1)


def _flat(spec: TensorSpec, slices: Sequence[PatchSlice]) -> list[tuple[npt.NDArray[np.int64], Bits]]:
    """Slices in flat positions of the full tensor, each increasing."""
    found = []
    for box, positions, value in slices:
        if not value.size:
            continue
        local = np.arange(box.numel, dtype=np.int64) if positions is None else positions
        found.append((Layout.of(box, spec.shape).flat_index(local), value))
    return found


def _merge_sparse(parts: Sequence[tuple[npt.NDArray[np.int64], Bits]], spec: TensorSpec) -> Changes:
    if not parts:
        return Changes(np.empty(0, np.int64), np.empty(0, bits_dtype(spec.dtype)))
    if len(parts) == 1:
        return Changes(*parts[0])
    positions = np.concatenate([part[0] for part in parts])
    values = np.concatenate([part[1] for part in parts])
    if not bool((positions[1:] > positions[:-1]).all()):
        order = np.argsort(positions, kind="stable")  # equal positions stay in version order
        positions, values = positions[order], values[order]
        last = np.empty(positions.size, np.bool_)
        last[-1] = True
        np.not_equal(positions[1:], positions[:-1], out=last[:-1])
        positions, values = positions[last], values[last]
    return Changes(positions, values)
