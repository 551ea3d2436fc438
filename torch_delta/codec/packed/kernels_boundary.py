"""Compiled twin of how the boundary of a piece is picked, by element width; see `classes.py` for what it computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from torch_delta.codec.compiling import Kernel, view

if TYPE_CHECKING:
    from torch_delta.codec.compiling import Build, Source

_WORTH_COMPILING = 1 << 21
"""Elements of small pieces: of those numpy needs more time for the pick than for everything else."""


def _position_bits(changed, total, table, mantissa_bits, list_bits):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    if changed == 0:
        return 0
    rest = total - changed
    if rest == 0:
        return list_bits
    logs = 0, 0, 0
    for which in range(3):
        value = total if which == 0 else changed if which == 1 else rest
        power = 0
        while value >> power > 1:
            power += 1
        log = (power << 16) + table[(value << mantissa_bits >> power) - (1 << mantissa_bits)]
        if which == 0:
            logs = log, logs[1], logs[2]
        elif which == 1:
            logs = logs[0], log, logs[2]
        else:
            logs = logs[0], logs[1], log
    return changed * (logs[0] - logs[1]) + rest * (logs[0] - logs[2]) + list_bits


def _boundary(width: int) -> Build:
    kind: Any = getattr(np, f"uint{8 * width}")

    def build(numba: Any) -> Source:
        position_bits = numba.njit(_position_bits, nogil=True)

        def boundary(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0917
            region,  # noqa: ANN001
            old,  # noqa: ANN001
            step,  # noqa: ANN001
            shift,  # noqa: ANN001
            magnitude,  # noqa: ANN001
            num_exponents,  # noqa: ANN001
            table,  # noqa: ANN001
            mantissa_bits,  # noqa: ANN001
            list_bits,  # noqa: ANN001
            most_candidates,  # noqa: ANN001
        ):
            mask, below = kind(magnitude), kind(shift)
            # Entry e + 1 counts exponent e, so that the entries become sums over everything below.
            total = np.zeros(num_exponents + 1, np.int64)
            changed = np.zeros(num_exponents + 1, np.int64)
            for i in range(0, region.size, step):
                total[np.int64((region[i] & mask) >> below) + 1] += step
            for i in range(old.size):
                changed[np.int64((old[i] & mask) >> below) + 1] += 1
            first = last = -1
            for e in range(num_exponents):
                total[e + 1] = max(total[e + 1], changed[e + 1])
                if total[e + 1]:
                    first = e if first < 0 else first
                    last = e
                total[e + 1] += total[e]
                changed[e + 1] += changed[e]
            if first < 0 or num_exponents == 1:
                return -1
            best = -1
            fewest = position_bits(changed[num_exponents], total[num_exponents], table, mantissa_bits, list_bits)
            for candidate in range(max(first, last - most_candidates + 1), last + 1):
                cost = 0
                before = 0
                for c in range(8):
                    end = min(candidate + 1 + c, num_exponents) if c < 7 else num_exponents
                    cost += position_bits(
                        changed[end] - changed[before], total[end] - total[before], table, mantissa_bits, list_bits
                    )
                    before = end
                if cost < fewest:
                    best, fewest = candidate, cost
            return best

        types = numba.types
        read, number = view(numba, f"uint{8 * width}"), types.int64
        signature = number(
            *(read, read, number, number, types.uint64, number),
            *(view(numba, "int64"), number, number, number),
        )
        return boundary, [signature]

    return build


BOUNDARY = {width: Kernel(_boundary(width), _WORTH_COMPILING) for width in (1, 2, 4, 8)}
"""By element width: (region, old, sample step, shift, magnitude, number of exponents, log2 table, its bits, bits of a
list, most candidates) -> boundary, or -1 for one class."""
