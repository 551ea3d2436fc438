"""The two Triton kernels of `triton_sweep.py`. Imported only where Triton is installed."""

# No `from __future__ import annotations`: Triton reads the annotations of its functions.
# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR0917

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _served(bits_ptr, at, mask, nan_bits, IS_FP32: tl.constexpr):  # type: ignore[no-untyped-def]
    """Serving bits of some elements: fp32 is rounded to bf16, to nearest even; every NaN becomes `nan_bits`."""
    bits = tl.load(bits_ptr + at, mask=mask, other=0)
    if IS_FP32:
        wide = bits.to(tl.uint32, bitcast=True)
        nearest = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16
        is_nan = (wide & 0x7FFFFFFF) > 0x7F800000
        bits = tl.where(is_nan, nan_bits.to(tl.uint32), nearest).to(tl.uint16).to(tl.int16, bitcast=True)
    return bits


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def count(bits_ptr, before_ptr, counts_ptr, num, nan_bits, IS_FP32: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many elements of each block differ."""
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    mask = at < num
    now = _served(bits_ptr, at, mask, nan_bits, IS_FP32)
    was = tl.load(before_ptr + at, mask=mask, other=0)
    tl.store(counts_ptr + block, tl.sum(((now != was) & mask).to(tl.int32), axis=0))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def take(  # type: ignore[no-untyped-def]
    bits_ptr,
    before_ptr,
    starts_ptr,
    index_ptr,
    old_ptr,
    new_ptr,
    num,
    nan_bits,
    IS_FP32: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Positions, old and new bits of what differs, from each block's start on; the copy becomes the present."""
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    mask = at < num
    now = _served(bits_ptr, at, mask, nan_bits, IS_FP32)
    was = tl.load(before_ptr + at, mask=mask, other=0)
    differ = (now != was) & mask
    to = tl.load(starts_ptr + block) + tl.cumsum(differ.to(tl.int32), axis=0) - 1
    tl.store(index_ptr + to, at.to(index_ptr.dtype.element_ty), mask=differ)
    tl.store(old_ptr + to, was, mask=differ)
    tl.store(new_ptr + to, now, mask=differ)
    tl.store(before_ptr + at, now, mask=differ)
