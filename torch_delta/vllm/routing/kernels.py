"""The compiled inner loop of a write on the host. numba is optional: without it numpy does the same, slower.

One call does compare, write and read back for a run of elements that may reach over many storages, so that a model of
many tensors costs no more calls, and no more hand-overs of the GIL between threads, than one of few. Inside it goes a
block at a time: an element is compared and written in one visit, and the block is read back while its cache lines are
at hand, so that memory is read once and written once. What bounds it is waiting for those lines, each in a place of its
own, so they are asked for some elements ahead (benchmarks/RESULTS.md says what that gains, and how far it is to what
memory allows).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_delta.codec.compiling import Kernel

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_delta.codec.compiling import Build, Source

BLOCK = 256  # elements; their cache lines and the three arrays stay in a core's first cache
AHEAD = 64
"""Elements between the one that is written and the one whose cache line is asked for."""

OK, OLD_DIFFERS, NEW_DIFFERS = 0, 1, 2

_NUMEL = 1 << 62  # as good as no bound: positions were checked against their storages when the plan was made


def _write(index_type: str, bits_type: str) -> Build:
    def build(numba: Any) -> Source:
        types = numba.types
        element = getattr(types, bits_type)

        @numba.extending.intrinsic
        def pointer(_typing, address):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
                return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

            return types.CPointer(element)(address), generate

        ask = ask_for(numba)
        carray, width = numba.carray, element.bitwidth // 8

        def write(addresses, ends, index, old, new, segment, start, end):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0917
            at = start
            while at < end:
                while ends[segment] <= at:
                    segment += 1
                address = addresses[segment]
                flat = carray(pointer(address), _NUMEL)
                last = min(end, ends[segment])
                stop = min(at + np.int64(BLOCK), last)
                has_ahead = max(at, min(stop, last - np.int64(AHEAD)))
                for i in range(at, has_ahead):
                    ask(address + np.int64(width) * np.int64(index[i + np.int64(AHEAD)]))
                    if flat[index[i]] != old[i]:
                        return i, np.int64(OLD_DIFFERS)
                    flat[index[i]] = new[i]
                for i in range(has_ahead, stop):
                    if flat[index[i]] != old[i]:
                        return i, np.int64(OLD_DIFFERS)
                    flat[index[i]] = new[i]
                wrong = np.int64(0)
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
        return write, [signature]

    return build


def ask_for(numba: Any) -> Callable[..., Any]:
    """(address int64): start bringing its cache line here, to be written. Never faults, whatever lies there."""
    from llvmlite import ir  # type: ignore[import-untyped]  # comes with numba

    def asking(_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            pointer, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [pointer, flag, flag, flag])
            prefetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
            for_writing, keep_near, data = flag(1), flag(3), flag(1)
            builder.call(prefetch, [builder.inttoptr(arguments[0], pointer), for_writing, keep_near, data])
            return context.get_dummy_value()

        return numba.types.void(address), generate

    made: Callable[..., Any] = numba.extending.intrinsic(asking)
    return made


_lock = threading.Lock()
_kernels: dict[tuple[str, str], Kernel] = {}


def compiled_write(index: np.dtype[Any], bits: np.dtype[Any]) -> Callable[..., Any] | None:
    """The kernel; None without numba. The first call compiles.

    It is called with the tables of a `targets.Batch`, the number of a segment at or before its first element, and the
    run of elements. It returns up to which element it has written, and the outcome: after `OLD_DIFFERS` that is the
    element which differs, after `NEW_DIFFERS` the end of the block in which one does.
    """
    with _lock:
        kernel = _kernels.setdefault((index.name, bits.name), Kernel(_write(index.name, bits.name)))
    return kernel.compile()
