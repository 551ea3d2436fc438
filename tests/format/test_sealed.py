"""Sealed JSON: what is accepted, and every way to break it (field case F116: JSON only, bounded, no pickle)."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_delta.errors import FormatError
from torch_delta.format import seal, unseal
from torch_delta.format.limits import MAX_JSON_BYTES
from torch_delta.format.sealed import load_json

# sha256 of the two bytes {}
EMPTY = b"{}\n44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a\n"


def test_literal_bytes() -> None:
    assert seal({}) == EMPTY
    assert unseal(EMPTY, key="x") == {}
    assert seal({"b": 1, "a": "é\n"}).startswith('{"a":"é\\n","b":1}\n'.encode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        EMPTY[:-1],
        EMPTY + b"\n",
        EMPTY[1:],
        EMPTY.upper(),
        EMPTY.replace(b"\n", b"\r\n"),
        EMPTY.replace(b"{}", b"[]"),
        b"\n" * 66,
        pickle.dumps({}),
    ],
)
def test_broken_seals(data, refuses) -> None:  # rule J1
    with refuses("J1"):
        unseal(data, key="commits/x.json")


def test_two_lines_are_refused(refuses, sealed) -> None:  # rule J1
    with refuses("J1", match="one line"):
        unseal(sealed(b"{\n}"), key="x")


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b"1",
        b"null",
        b"{} {}",
        b"{'a':1}",
        b'{"a":1,}',
        b'{"a":1,"a":1}',
        b'{"x":{"a":1,"b":2,"a":3}}',
        b'{"a":"\x01"}',
        b'{"a":"\xff"}',
        b"\xef\xbb\xbf{}",
        b"\x80\x04}.",
    ],
)
def test_documents_that_are_no_json_object(line, refuses, sealed) -> None:  # rule J2
    with refuses("J2"):
        unseal(sealed(line), key="x")


@pytest.mark.parametrize(
    "number",
    ["1.0", "1e2", "0.5", "NaN", "Infinity", "-Infinity", "9007199254740992", "-9007199254740992", "9" * 5000],
)
def test_numbers_that_are_no_small_integers(number, refuses, sealed) -> None:  # rule J3
    with refuses("J3"):
        unseal(sealed(f'{{"a":[{number}]}}'), key="x")


def test_largest_integers_pass(sealed) -> None:
    assert unseal(sealed('{"a":[9007199254740991,-9007199254740991]}'), key="x") == {"a": [2**53 - 1, 1 - 2**53]}


@pytest.mark.parametrize("value", [0.5, float("nan"), 2**53, b"x", {1: 2}, {"a": object()}, {"a": {"b": 1.0}}])
def test_values_that_cannot_be_stored(value) -> None:  # rule J3
    with pytest.raises(FormatError):
        seal({"a": value})


def test_deep_nesting(refuses, sealed) -> None:  # rule J4
    fine = '{"a":' + "[" * 15 + "]" * 15 + "}"
    assert "a" in unseal(sealed(fine), key="x")
    with refuses("J4"):
        unseal(sealed('{"a":' + "[" * 16 + "]" * 16 + "}"), key="x")
    with refuses("J4"):
        unseal(sealed('{"a":' + '{"a":' * 100_000 + "1" + "}" * 100_001), key="x")
    with refuses("J4"):
        unseal(sealed('{"a":' + "[" * 100_000 + "]" * 100_000 + "}"), key="x")
    assert "a" in unseal(sealed('{"a":' * 16 + "1" + "}" * 16), key="x")
    with refuses("J4"):
        unseal(sealed('{"a":' * 17 + "1" + "}" * 17), key="x")
    too_deep: dict = {}
    for _ in range(16):
        too_deep = {"a": too_deep}
    with refuses("J4"):
        seal(too_deep)
    assert unseal(seal(too_deep["a"]), key="x") == too_deep["a"]


def test_large_objects_are_refused_before_they_are_hashed(refuses) -> None:  # rule J5
    with refuses("J5"):
        unseal(EMPTY, key="x", max_bytes=len(EMPTY) - 1)
    with refuses("J5"):
        unseal(bytes(MAX_JSON_BYTES + 1), key="x")
    with refuses("J5"):
        load_json(b'{"a":1}', key="x", max_bytes=6)
    with refuses("J5"):
        seal({"a": "x" * MAX_JSON_BYTES})


def test_half_a_surrogate_pair(refuses, sealed) -> None:  # rule J7
    assert unseal(sealed(r'{"a":"\ud83d\ude00"}'), key="x") == {"a": "😀"}
    for line in (r'{"a":"\ud800"}', r'{"\udfff":1}'):
        with refuses("J7"):
            unseal(sealed(line), key="x")
    with refuses("J7"):
        seal({"a": "\ud800"})


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(1 - 2**53, 2**53 - 1) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), VALUES, max_size=4))
def test_what_is_sealed_comes_back(value) -> None:
    data = seal(value)
    assert unseal(data, key="x") == value
    assert json.loads(data.split(b"\n")[0]) == value


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_with_a_format_error(data) -> None:
    with pytest.raises(FormatError):
        unseal(data, key="x")
