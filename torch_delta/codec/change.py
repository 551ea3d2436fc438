"""What changed in one box of one tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from torch_delta.codec.bits import Bits, Index, bits_dtype, index_dtype
from torch_delta.codec.diff import diff
from torch_delta.codec.digest import digest_box, digest_changes
from torch_delta.codec.geometry import Layout
from torch_delta.format.digest import ZERO

if TYPE_CHECKING:
    import numpy.typing as npt

    from torch_delta.codec.packed.reduced import Reduced
    from torch_delta.format.box import Box
    from torch_delta.format.digest import Digest
    from torch_delta.format.schema import Schema

__all__ = ["Change", "diff"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Change:
    """New bits of some or all elements of a box, and the old ones where they are known.

    Attributes:
        tensor: schema index, not of an alias.
        box: in full-tensor coordinates.
        index: box-local row-major positions, strictly increasing, uint32 (int64 from 2**32 elements on); None: every
            element of the box.
        old: bits before, `[count]`; None where they are not known, and then only absolute encodings can carry the
            change.
        new: bits after, `[count]`, 1-D.
        dense: bits after of the whole box, `[box.numel]`, if they are at hand; lets the writer pick `dense` for a box
            of which a large share changed.
        reduced: what `packed` needs of the bits of the whole box, one entry per piece with changes
            (`packed.reduced.reduce_change`); None: the box was not at hand, and `packed` does without classes.
        increment: what the change adds to the tensor's digest; computed from index, old and new where it is None.
        digests: of the old and of the new bits at `index`, where they were computed from these very arrays.
    """

    tensor: int
    box: Box
    index: Index | None
    old: Bits | None
    new: Bits
    dense: Bits | None = None
    reduced: tuple[Reduced, ...] | None = None
    increment: Digest | None = None
    digests: tuple[Digest, Digest] | None = None

    @classmethod
    def resend(cls, tensor: int, box: Box, new: Bits, increment: Digest) -> Change:
        """A whole box whose old bits are not known; the sender knows the old digest, and so the increment."""
        return cls(tensor=tensor, box=box, index=None, old=None, new=new.reshape(-1), increment=increment)

    @property
    def count(self) -> int:
        """Elements set."""
        return self.new.size

    @property
    def whole(self) -> Bits | None:
        """New bits of the whole box, `[box.numel]`, if the change has them."""
        return self.new if self.count == self.box.numel else self.dense

    def positions(self) -> Index:
        """`index`, spelled out where it is None."""
        return np.arange(self.box.numel, dtype=index_dtype(self.box.numel)) if self.index is None else self.index

    def flat_index(self, schema: Schema) -> npt.NDArray[np.int64]:
        """Flat row-major indices in the full tensor, `[count]`."""
        if not self.count:
            return np.empty(0, np.int64)
        return Layout.of(self.box, schema.tensors[self.tensor].shape).flat_index(self.positions())

    def with_increment(self, increment: Digest) -> Change:
        """The same change, with its increment stated."""
        return replace(self, increment=increment)

    def with_digests(self, schema: Schema) -> Change:
        """The same change with `digests`, and its increment if that is not stated yet; in O(count).

        Raises:
            ValueError: the old bits are not known.
        """
        digests = self.computed_digests(schema)
        increment = digests[1] - digests[0] if self.increment is None else self.increment
        return replace(self, digests=digests, increment=increment)

    def computed_digests(self, schema: Schema) -> tuple[Digest, Digest]:
        """Digest of the old and of the new bits, in O(count) unless `digests` is known.

        Raises:
            ValueError: the old bits are not known.
        """
        if self.digests is not None:
            return self.digests
        spec = schema.tensors[self.tensor]
        if self.old is None:
            raise ValueError(f"{spec.name}: no old bits to compute a digest increment from")
        if not self.count:
            return ZERO, ZERO
        if self.index is None:
            before, after = (bits.reshape(self.box.shape) for bits in (self.old, self.new))
            return digest_box(before, self.box, spec.shape), digest_box(after, self.box, spec.shape)
        return digest_changes(Layout.of(self.box, spec.shape), self.index, self.old, self.new)

    def computed_increment(self, schema: Schema) -> Digest:
        """The increment from index, old and new, in O(count).

        Raises:
            ValueError: the old bits are not known.
        """
        before, after = self.computed_digests(schema)
        return after - before

    def check(self, schema: Schema) -> None:
        """Check the change against the schema and itself.

        Raises:
            ValueError: what does not fit; names the tensor.
        """
        spec = schema.tensors[self.tensor]
        numel = self.box.numel
        kind = bits_dtype(spec.dtype)
        arrays = {"old": self.old, "new": self.new, "dense": self.dense}
        problem = None
        if spec.alias_of is not None:
            problem = f"it is an alias of {spec.alias_of}"
        elif not self.box.fits(spec.shape):
            problem = f"the box {self.box.offset} {self.box.shape} is outside its shape {spec.shape}"
        elif bad := [
            f"{name} {array.dtype}" for name, array in arrays.items() if array is not None and array.dtype != kind
        ]:
            problem = f"{', '.join(bad)} for elements of dtype {spec.dtype}, whose bits are {kind}"
        elif self.dense is not None and self.dense.shape != (numel,):
            problem = f"dense has shape {self.dense.shape}, the box has {numel} elements"
        elif self.old is None and self.increment is None:
            problem = "neither old bits nor an increment"
        elif self.reduced is not None and sum(reduced.count for reduced in self.reduced) != self.count:
            problem = f"reduced to {sum(reduced.count for reduced in self.reduced)} of its {self.count} elements"
        else:
            problem = self._index_problem(numel)
        if problem is not None:
            raise ValueError(f"change of {spec.name}: {problem}")

    def _index_problem(self, numel: int) -> str | None:
        shapes = {array.shape for array in (self.index, self.old, self.new) if array is not None}
        if len(shapes) != 1 or self.new.ndim != 1:
            return f"index, old and new must be 1-D of one length, got {sorted(shapes)}"
        index = self.index
        if index is None:
            return None if self.new.size == numel else f"{self.new.size} values for a box of {numel} elements"
        if index.dtype not in (np.dtype(np.uint32), np.dtype(np.int64)):
            return f"index is {index.dtype}, not uint32 or int64"
        if index.size and (int(index[0]) < 0 or int(index[-1]) >= numel or not bool((index[1:] > index[:-1]).all())):
            return f"index must be strictly increasing inside [0, {numel})"
        return None
