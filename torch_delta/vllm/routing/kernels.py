"""The compiled inner loop of a write on the host. numba is optional: without it numpy does the same, slower.

One call does compare, write and read back for a run of elements that may reach over many storages, so that a model of
many tensors costs no more calls, and no more hand-overs of the GIL between threads, than one of few. Inside it goes a
block at a time: the cache lines that the comparison brought in serve the other two passes, so that memory is read once
and written once.
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

_NUMEL = 1 << 62  # as good as no bound: positions were checked against their storages when the plan was made


def _write(index_type: str, bits_type: str) -> Callable[[Any], Callable[..., Any]]:
    def build(numba: Any) -> Callable[..., Any]:
        types = numba.types
        element = getattr(types, bits_type)

        @numba.extending.intrinsic
        def pointer(_typing, address):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
                return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

            return types.CPointer(element)(address), generate

        carray = numba.carray

        def write(addresses, ends, index, old, new, segment, start, end):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0917
            at = start
            while at < end:
                while ends[segment] <= at:
                    segment += 1
                flat = carray(pointer(addresses[segment]), _NUMEL)
                stop = min(at + np.int64(BLOCK), end, ends[segment])
                wrong = np.int64(0)
                for i in range(at, stop):
                    wrong += np.int64(flat[index[i]] != old[i])
                if wrong:
                    return at, np.int64(OLD_DIFFERS)
                for i in range(at, stop):
                    flat[index[i]] = new[i]
                for i in range(at, stop):
                    wrong += np.int64(flat[index[i]] != new[i])
                if wrong:
                    return stop, np.int64(NEW_DIFFERS)
                at = stop
            return at, np.int64(OK)

        def view(dtype: str) -> Any:
            return types.Array(getattr(types, dtype), 1, "C", readonly=True, aligned=False)

        signature = types.UniTuple(types.int64, 2)(
            view("int64"), view("int64"), view(index_type), view(bits_type), view(bits_type), *[types.int64] * 3
        )
        compiled: Callable[..., Any] = numba.njit([signature], nogil=True)(write)
        return compiled

    return build


_lock = threading.Lock()
_kernels: dict[tuple[str, str], Kernel] = {}


def compiled_write(index: np.dtype[Any], bits: np.dtype[Any]) -> Callable[..., Any] | None:
    """The kernel; None without numba. The first call compiles.

    It is called with the tables of a `targets.Batch`, the number of a segment at or before its first element, and the
    run of elements. It returns up to which element it came, and the outcome: to the block that failed, and beyond it
    after `NEW_DIFFERS`, as it was written.
    """
    with _lock:
        kernel = _kernels.setdefault((index.name, bits.name), Kernel(_write(index.name, bits.name)))
    return kernel.compile()
