"""Cast, compare and compact on an NVIDIA GPU: two passes over the weights and one wait for the device.

    pass 1  every block of BLOCK elements: load weights, round fp32 to bf16, compare with the copy, count
    scan    sums over the blocks (torch); the total is the only number the host waits for
    pass 2  the same blocks again: positions, old and new bits to where the scan says, ascending; the copy moves along

Neither the rounded weights nor flags are written anywhere: extra memory is 20 bytes per block and the result. Triton
comes with torch's CUDA builds; where it is missing, `sweep.py` does the same in torch operations.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch

from torch_delta.capture import arrays

if TYPE_CHECKING:
    from types import ModuleType

BLOCK: Final = 4096
"""Elements per program."""

Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def sweep_on_device(before: torch.Tensor, weights: torch.Tensor) -> Found | None:
    """What differs between a copy and the weights now; the copy becomes the weights now.

    Args:
        before: bf16 bits (int16) [n] on a CUDA device, written.
        weights: fp32 or bf16 weights [n] on the same device, contiguous.

    Returns:
        Positions (int32, or int64 from 2^31 elements on), old and new bits, ascending, on the device; None if Triton is
        missing or this is not a case of its kernels.
    """
    fits = before.dtype == torch.int16 and weights.dtype in {torch.float32, torch.bfloat16}
    if before.device.type != "cuda" or weights.device != before.device or not fits or not before.numel():
        return None
    kernels, nan = _kernels(), arrays.nan_bits("cuda")
    if kernels is None or nan is None:
        return None
    with torch.cuda.device(before.device):
        return run(kernels, before, weights, nan)


def run(kernels: ModuleType, before: torch.Tensor, weights: torch.Tensor, nan: int) -> Found:
    """Launch the passes; see `sweep_on_device`.

    Args:
        kernels: `triton_kernels`.
        before: see there; not empty.
        weights: see there.
        nan: bf16 bits of every NaN.
    """
    num, device = before.numel(), before.device
    num_blocks = -(-num // BLOCK)
    is_fp32 = weights.dtype == torch.float32
    bits = weights.view(torch.int32 if is_fp32 else torch.int16)
    counts = torch.empty(num_blocks, dtype=torch.int32, device=device)
    kernels.count[num_blocks,](bits, before, counts, num, nan, IS_FP32=is_fp32, BLOCK=BLOCK)
    ends = counts.cumsum(0, dtype=torch.int64)
    total = int(ends[-1])  # the one wait
    index = torch.empty(total, dtype=arrays.index_dtype(num), device=device)
    old, new = (torch.empty(total, dtype=torch.int16, device=device) for _ in range(2))
    if total:
        starts = ends - counts
        kernels.take[num_blocks,](bits, before, starts, index, old, new, num, nan, IS_FP32=is_fp32, BLOCK=BLOCK)
    return index, old, new


@cache
def _kernels() -> Any:
    """The kernels' module, or None without Triton."""
    try:
        from torch_delta.capture import triton_kernels
    except ImportError:
        return None
    return triton_kernels
