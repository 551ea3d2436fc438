"""The compiled inner loop of a write on the host. numba is optional: without it numpy does the same, slower.

One call does compare, write and read back for a run of elements, a block at a time: the cache lines that the comparison
brought in serve the other two passes, so that memory is read once and written once.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_delta.codec.kernels import Kernel

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK = 2048  # elements; their cache lines and the three arrays stay in a core's own cache

OK, OLD_DIFFERS, NEW_DIFFERS = 0, 1, 2


def _write(index_type: str, bits_type: str) -> Callable[[Any], Callable[..., Any]]:
    def build(numba: Any) -> Callable[..., Any]:
        def write(flat, index, old, new):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            at = np.int64(0)
            total = np.int64(index.size)
            while at < total:
                end = min(at + np.int64(BLOCK), total)
                places, before, after = index[at:end], old[at:end], new[at:end]
                wrong = np.int64(0)
                for i in range(places.size):
                    wrong += np.int64(flat[places[i]] != before[i])
                if wrong:
                    return at, np.int64(OLD_DIFFERS)
                for i in range(places.size):
                    flat[places[i]] = after[i]
                for i in range(places.size):
                    wrong += np.int64(flat[places[i]] != after[i])
                if wrong:
                    return end, np.int64(NEW_DIFFERS)
                at = end
            return at, np.int64(OK)

        types = numba.types

        def view(dtype: str, *, readonly: bool) -> Any:
            return types.Array(getattr(types, dtype), 1, "C", readonly=readonly, aligned=False)

        signature = types.UniTuple(types.int64, 2)(
            view(bits_type, readonly=False), view(index_type, readonly=True), *[view(bits_type, readonly=True)] * 2
        )
        compiled: Callable[..., Any] = numba.njit([signature], nogil=True)(write)
        return compiled

    return build


_lock = threading.Lock()
_kernels: dict[tuple[str, str], Kernel] = {}


def compiled_write(index: np.dtype[Any], bits: np.dtype[Any]) -> Callable[..., Any] | None:
    """The kernel ``(flat, index, old, new) -> (elements done, outcome)``; None without numba. The first call compiles.

    Done are those before the block that failed; after `NEW_DIFFERS` the failing block too, as it was written.
    """
    with _lock:
        kernel = _kernels.setdefault((index.name, bits.name), Kernel(_write(index.name, bits.name)))
    return kernel.compile()
