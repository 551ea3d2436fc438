"""Arrays of compiled kernels by address: one call then reads the regions of many tensors.

numba types an array, not a list of arrays: to take a list apart costs it as much as a call per array. An address is an
integer, and many of them are an array. Whoever passes them keeps the arrays alive and where they are during the call.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch_delta.codec.compiling import view

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt


def address(array: npt.NDArray[Any]) -> int:
    """Where a contiguous array begins."""
    assert array.flags.c_contiguous
    return int(array.__array_interface__["data"][0])


def array_at(numba: Any, dtype: str, *, readonly: bool = True) -> Callable[..., Any]:
    """(address int64, number of elements int64) -> a 1-D array at any alignment; for kernels."""
    found = view(numba, dtype, readonly=readonly)

    def make(_context: Any, at: Any, size: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            arrays = importlib.import_module("numba.np.arrayobj")
            array = arrays.make_array(found)(context, builder)
            bytes_per_element = context.get_constant(numba.types.intp, found.dtype.bitwidth // 8)
            arrays.populate_array(
                array,
                data=builder.inttoptr(arguments[0], context.get_data_type(found.dtype).as_pointer()),
                shape=[arguments[1]],
                strides=[bytes_per_element],
                itemsize=bytes_per_element,
                meminfo=None,
            )
            return array._getvalue()

        return found(at, size), generate

    compiled: Callable[..., Any] = numba.extending.intrinsic(make)
    return compiled
