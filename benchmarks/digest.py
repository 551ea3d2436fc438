"""The candidates for the additive digest beside xxh3-128 and memcpy, in one interleaved run (docs/adr/0001).

    python benchmarks/digest.py                      # 64 MiB of bf16 bits, 9 repeats
    python benchmarks/digest.py --mib 256 --repeats 15 --json out.json

Every candidate digests the same random 16-bit elements with one thread. A repeat runs each once, in an order that
rotates; the table has medians and the median of the per-repeat ratios to xxh3-128. The second table is the update of
a digest after some share of the elements changed, as a share of the time of a full xxh3 pass; the third compares what
the candidates notice. Needs numba and xxhash.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numba
import numpy as np
import xxhash
from measure import Samples, machine, median_ratio, table, timed

from torch_delta.codec import digest as ours
from torch_delta.codec.diff import diff
from torch_delta.codec.kernels import CHANGED, DIGEST_DELTA, DIGEST_ROWS

if TYPE_CHECKING:
    from collections.abc import Callable

U = np.uint64


@numba.njit(nogil=True)
def fmix64(words, start):
    """One lane, nonlinear: a finaliser per element over (index, bits)."""
    total = U(0)
    for i in range(words.size):
        x = ((U(start) + U(i)) << U(16)) | U(words[i])
        x ^= x >> U(33)
        x *= U(0xFF51AFD7ED558CCD)
        x ^= x >> U(33)
        x *= U(0xC4CEB9FE1A85EC53)
        x ^= x >> U(33)
        total += x
    return total


@numba.njit(nogil=True)
def rows_columns_2(matrix, column0, column1, row0, row1):
    """Two lanes, linear: a key per row times a key per column of the tensor's own shape."""
    lane0 = lane1 = U(0)
    for row in range(matrix.shape[0]):
        sum0 = sum1 = U(0)
        part = matrix[row]
        for i in range(part.size):
            word = U(part[i])
            sum0 += word * column0[i]
            sum1 += word * column1[i]
        lane0 += sum0 * row0[row]
        lane1 += sum1 * row1[row]
    return lane0, lane1


@numba.njit(nogil=True)
def flat_1(words, column0, block0):
    """One lane, linear: keys by flat index, blocks of 1024."""
    lane0 = U(0)
    for block in range(words.size // 1024):
        sum0 = U(0)
        part = words[block * 1024 : block * 1024 + 1024]
        for i in range(1024):
            sum0 += U(part[i]) * column0[i]
        lane0 += sum0 * block0[block]
    return lane0


def candidates(bits: np.ndarray) -> dict[str, Callable[[], object]]:
    rng = np.random.default_rng(1)
    keys = [rng.integers(0, 2**63, 1 << 16, dtype=U) * U(2) + U(1) for _ in range(4)]
    matrix = bits.reshape(-1, 4096)
    rows = [rng.integers(0, 2**63, matrix.shape[0], dtype=U) * U(2) + U(1) for _ in range(2)]
    blocks = rng.integers(0, 2**63, bits.size // 1024, dtype=U) * U(2) + U(1)
    return {
        "xxh3-128 of the bytes": lambda: xxhash.xxh3_128_intdigest(bits),
        "memcpy": bits.copy,
        "fmix64 per element, 1 lane": lambda: fmix64(bits, 5),
        "row x column keys, 2 lanes": lambda: rows_columns_2(matrix, keys[0][:4096], keys[1][:4096], *rows),
        "flat index keys, 1 lane": lambda: flat_1(bits, keys[0], blocks),
        "flat index keys, 2 lanes (ours)": lambda: ours.digest_array(bits),
        "ours, numpy reference": lambda: ours._rows_numpy(bits, 1, bits.size, 0, 0),
        "ours, as 1-byte elements": lambda: ours.digest_array(bits.view(np.uint8)),
        "ours, as 4-byte elements": lambda: ours.digest_array(bits.view(np.uint32)),
    }


def interleaved(work: dict[str, Callable[[], object]], repeats: int) -> dict[str, Samples]:
    samples = {name: Samples() for name in work}
    names = list(work)
    for name in names:
        work[name]()
    for repeat in range(repeats):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            samples[name].seconds.append(timed(work[name], flush=False))
    return samples


def updates(bits: np.ndarray) -> dict[str, Callable[[], object]]:
    work: dict[str, Callable[[], object]] = {"xxh3-128 of the bytes": lambda: xxhash.xxh3_128_intdigest(bits)}
    rng = np.random.default_rng(2)
    for share in (0.001, 0.01, 0.05):
        new = bits.copy()
        new[rng.random(bits.size) < share] ^= 1
        index = diff(bits, new)
        old_bits, new_bits = bits[index], new[index]
        work[f"update, {share:.1%} changed"] = lambda i=index, a=old_bits, b=new_bits: ours.digest_delta(i, a, b)
    return work


def noticed(trials: int) -> list[list[object]]:
    """How many random corruptions of a 64 KiB tensor each digest notices, per kind."""
    rng = np.random.default_rng(3)
    rows: list[list[object]] = []
    for width in (2, 4):
        kinds = {"swap": 0, "bit flip": 0, "two sign flips": 0, "rows rolled": 0, "shift": 0, "all -0.0": 0}
        for _ in range(trials):
            bits = rng.integers(1, 2 ** (8 * width) - 1, 4096, dtype=f"<u{width}")
            expected = ours.digest_array(bits)
            for kind in kinds:
                bad = bits.copy()
                i, j = rng.choice(bits.size, 2, replace=False)
                top = bits.dtype.type(1 << (8 * width - 1))
                if kind == "swap":
                    bad[[i, j]] = bits[[j, i]]
                elif kind == "bit flip":
                    bad[i] ^= bits.dtype.type(1 << int(rng.integers(8 * width)))
                elif kind == "two sign flips":
                    bad[[i, j]] ^= top
                elif kind == "rows rolled":
                    bad = np.roll(bits.reshape(64, 64), int(rng.integers(1, 64)), axis=0).reshape(-1)
                elif kind == "shift":
                    bad = np.roll(bits, int(rng.integers(1, 4096)))
                else:
                    bad[:] = top
                kinds[kind] += np.array_equal(bad, bits) or ours.digest_array(bad) != expected
        rows.append([f"{8 * width}-bit", *(f"{count}/{trials}" for count in kinds.values())])
    return [["element", *kinds], *rows]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=64, help="size of the tensor")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--trials", type=int, default=2000, help="corruptions of each kind")
    parser.add_argument("--json", help="write the numbers there")
    options = parser.parse_args(argv)
    for kernel in (*DIGEST_ROWS.values(), DIGEST_DELTA, *CHANGED.values()):
        kernel.compile()
    bits = np.random.default_rng(0).integers(0, 2**16, options.mib << 19, dtype=np.uint16)
    full = interleaved(candidates(bits), options.repeats)
    update = interleaved(updates(bits), options.repeats)
    seen = noticed(options.trials)
    print(machine(), "\n")
    base = full["xxh3-128 of the bytes"].seconds
    speeds = [
        [name, f"{bits.nbytes / item.median_s / 1e9:.1f}", f"{median_ratio(base, item.seconds):.2f}"]
        for name, item in full.items()
    ]
    print(table(["full pass", "GB/s", "of xxh3's speed"], speeds), "\n")
    base = update["xxh3-128 of the bytes"].seconds
    shares = [
        [name, f"{item.median_s * 1e3:.2f}", f"{median_ratio(item.seconds, base):.2f}"] for name, item in update.items()
    ]
    print(table(["update", "ms", "of xxh3's time"], shares), "\n")
    print(table(seen[0], seen[1:]))
    if options.json:
        numbers = {"machine": machine(), "full": speeds, "update": shares, "noticed": seen}
        Path(options.json).write_text(json.dumps(numbers, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
