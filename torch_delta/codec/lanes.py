"""Sixty-four elements at a time as vector instructions, for compiled kernels: what a loop does not turn into.

A comparison of 64 elements is one mask of 64 bits, which counting and finding bits then work on. Built as LLVM vectors,
so that numba emits what the machine has (AVX2, AVX-512, NEON). Every function here makes something that a kernel calls;
arrays may lie at any alignment. Nothing is checked: the caller sees to it that 64 elements are there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

LANES: Final = 64
"""Elements per mask."""
_ALWAYS, _AT_ONCE = 4, 8
"""Positions written per mask whether there are as many or not (the next mask writes over those too many), and how many
where the former were too few."""

_U = np.uint64


def _ir() -> Any:
    """What numba builds its instructions with; it comes with numba."""
    from llvmlite import ir  # type: ignore[import-untyped]

    return ir


def _load(  # noqa: PLR0917 - what numba hands to an intrinsic
    ir: Any, context: Any, builder: Any, kind: Any, array: Any, at: Any
) -> Any:
    """64 elements of an array as a vector."""
    data = context.make_array(kind)(context, builder, array).data
    element = context.get_value_type(kind.dtype)
    vector = ir.VectorType(element, LANES)
    where = builder.bitcast(builder.gep(data, [at]), vector.as_pointer())
    return builder.load(where, align=1)


def _mask(ir: Any, builder: Any, flags: Any) -> Any:
    return builder.bitcast(flags, ir.IntType(LANES))


def _splat(ir: Any, builder: Any, value: Any) -> Any:
    vector = ir.VectorType(value.type, LANES)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


def differing(numba: Any) -> Callable[..., Any]:
    """(array, array of the same type, position) -> uint64 with a bit for each of 64 elements that differ."""
    ir = _ir()

    def differ(_context: Any, left: Any, right: Any, at: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            first, second = (
                _load(ir, context, builder, signature.args[place], arguments[place], arguments[2]) for place in (0, 1)
            )
            return _mask(ir, builder, builder.icmp_unsigned("!=", first, second))

        return numba.types.uint64(left, right, at), generate

    compiled: Callable[..., Any] = numba.extending.intrinsic(differ)
    return compiled


def class_planes(numba: Any) -> Callable[..., Any]:
    """(array, position, magnitude, shift, boundary) -> the three bits of the classes of 64 elements, a mask for each.

    Magnitude, shift and boundary have the type of the elements; see `packed.classes` for what a class is.
    """
    ir = _ir()

    def planes(_context: Any, array: Any, at: Any, magnitude: Any, shift: Any, boundary: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            bits = _load(ir, context, builder, signature.args[0], arguments[0], arguments[1])
            keep, below, first = (_splat(ir, builder, value) for value in arguments[2:])
            exponent = builder.lshr(builder.and_(bits, keep), below)
            # LLVM knows both patterns: a saturating subtraction and a minimum.
            none, most = (ir.Constant(bits.type, [value] * LANES) for value in (0, 7))
            above = builder.icmp_unsigned(">", exponent, first)
            classes = builder.select(above, builder.sub(exponent, first), none)
            classes = builder.select(builder.icmp_unsigned("<", classes, most), classes, most)
            small = ir.VectorType(ir.IntType(8), LANES)
            if bits.type.element.width > 8:
                classes = builder.trunc(classes, small)
            zero = ir.Constant(small, [0] * LANES)
            found = []
            for plane in range(3):
                moved = builder.shl(classes, ir.Constant(small, [7 - plane] * LANES))
                found.append(_mask(ir, builder, builder.icmp_signed("<", moved, zero)))
            return context.make_tuple(builder, signature.return_type, found)

        result = numba.types.UniTuple(numba.types.uint64, 3)
        return result(array, at, magnitude, shift, boundary), generate

    compiled: Callable[..., Any] = numba.extending.intrinsic(planes)
    return compiled


def popcount(numba: Any) -> Callable[..., Any]:
    """uint64 -> how many of its bits are set, int64."""

    def count(_context: Any, word: Any) -> Any:
        def generate(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return builder.ctpop(arguments[0])

        return numba.types.int64(word), generate

    compiled: Callable[..., Any] = numba.extending.intrinsic(count)
    return compiled


def lowest(numba: Any) -> Callable[..., Any]:
    """uint64 -> place of its lowest bit, int64; 64 for 0."""
    ir = _ir()

    def place(_context: Any, word: Any) -> Any:
        def generate(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

        return numba.types.int64(word), generate

    compiled: Callable[..., Any] = numba.extending.intrinsic(place)
    return compiled


def differences(numba: Any) -> Callable[..., Any]:
    """(array, array of the same type, begin, end, start, int32 out, count) -> count: where two arrays differ.

    Positions from `begin` to `end`, a multiple of 64 apart, are written behind the `count` ones in `out`, ascending and
    with `start` added. `out` has room for `count` and as many as are compared. How many of 64 elements differ is no
    branch where it is few: at 1% a processor guesses every other one wrongly, which costs more than the element.
    """
    differ, place, count_bits = differing(numba), lowest(numba), popcount(numba)

    def differences(left, right, begin, end, start, out, count):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0917
        for at in range(begin, end, LANES):
            mask = differ(left, right, at)
            base, after = start + at, count + count_bits(mask)
            for k in range(_ALWAYS):
                out[_U(count + k)] = base + place(mask)
                mask &= mask - _U(1)
            if after > count + _ALWAYS:
                for k in range(_ALWAYS, _AT_ONCE):
                    out[_U(count + k)] = base + place(mask)
                    mask &= mask - _U(1)
                for k in range(count + _AT_ONCE, after):
                    out[_U(k)] = base + place(mask)
                    mask &= mask - _U(1)
            count = after
        return count

    compiled: Callable[..., Any] = numba.njit(differences, nogil=True)
    return compiled
