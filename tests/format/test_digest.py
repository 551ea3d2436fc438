"""The digest against its definition: literal vectors, addition over shards, what it must tell apart."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_delta.format import ITEMSIZE, ZERO, Digest, digest_words, state_sha256, unit_bytes
from torch_delta.format.digest import block_key, column_keys, digests_hex, parse_digests_hex, splitmix64, word_key

W0 = [0x3F80, 0x0000, 0x8000, 0x7FC0, 0x4000, 0x4040, 0x4080, 0x40A0]
W1 = [0x3F81, 0x0000, 0x0000, 0x7FC0, 0x4000, 0x4040, 0x4080, 0x40A1]


def test_key_generator() -> None:  # rule D1
    # The first outputs of the published splitmix64 generator with seed 0.
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert splitmix64(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4
    assert column_keys(0)[0] == 0xE220A8397B1DCDAF
    assert column_keys(1)[0] == 0xA285E7B0DEB63751
    assert block_key(0, 0) == 0xC8CCCC7379B18EC1
    assert block_key(1, 0) == 0x72113A39BAE97223
    assert all(word_key(lane, index) % 2 for lane in (0, 1) for index in (0, 1023, 1024, 2**48))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "00000000000000000000000000000000"),
        ([0x3F80], "8048aa418089e1e280b63306acbbc12b"),
        ([0x8000], "00807711472388620080095122e5b619"),
        ([0x7FC0], "40c4ee6d35df563b40fbe0bfaf092ae9"),
        ([0x7FC00000], "000040c4ee6d35df000040fbe0bfaf09"),
        ([i % 256 for i in range(2048)], "300157be79fdc7c8e0dbe0a287cf2d48"),
        (W0, "e05240872200b8412086661cb2b9b7e7"),
        (W1, "e6a6d7de5fed3c5f207c0334de7a39a6"),
    ],
)
def test_vectors(words, expected) -> None:  # rule D1
    assert digest_words(words).hex() == expected


def test_wide_elements_are_two_words() -> None:  # rule D2
    assert digest_words([0xFFFFFFFF, 0xFFFFFFFF]).hex() == "90e1c5c4e03665cf12d80e034b226612"
    assert {dtype: unit_bytes(dtype) for dtype in ("I8", "BF16", "F32", "F64", "I64")} == {
        "I8": 1,
        "BF16": 2,
        "F32": 4,
        "F64": 4,
        "I64": 4,
    }
    assert set(map(unit_bytes, ITEMSIZE)) == {1, 2, 4}
    # Low half first: one in the low half is word 0 of element 0.
    assert digest_words([1, 0]) == digest_words([1])
    assert digest_words([0, 1]) == digest_words([1], start=1)


def test_two_ranks_add_up() -> None:
    rows = digest_words(W0[:4]), digest_words(W0[4:], start=4)
    assert [digest.hex() for digest in rows] == ["405d8ae7fed2d01d40b8fa2de47eb4a3", "a0f5b59f232de723e0cd6beecd3a0344"]
    assert rows[0] + rows[1] == digest_words(W0)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50), st.integers(0, 2**49), st.data())
def test_sums_and_differences(words, start, data) -> None:
    cut = data.draw(st.integers(0, len(words)))
    whole = digest_words(words, start)
    assert digest_words(words[:cut], start) + digest_words(words[cut:], start + cut) == whole
    assert whole - whole == ZERO
    assert ZERO - whole + whole == ZERO
    if words:
        other = data.draw(st.integers(0, 2**32 - 1))
        changed = [*words[:-1], other]
        last = start + len(words) - 1
        step = Digest(tuple(word_key(lane, last) * (other - words[-1]) % 2**64 for lane in (0, 1)))
        assert whole + step == digest_words(changed, start)
        assert (digest_words(changed, start) == whole) == (other == words[-1])


@pytest.mark.parametrize(
    "other",
    [
        W0[::-1],
        [W0[1], W0[0], *W0[2:]],
        [*W0[1:], W0[0]],
        [0] * 8,
        [word ^ 0x8000 for word in W0],
        [word + 1 for word in W0],
        [word >> 8 | (word & 255) << 8 for word in W0],
    ],
)
def test_what_it_tells_apart(other) -> None:
    assert digest_words(other) != digest_words(W0)


def test_state_hash() -> None:  # rule D3
    parts = [digest_words(W0), digest_words(W1)]
    stored = bytes.fromhex("e05240872200b8412086661cb2b9b7e7e6a6d7de5fed3c5f207c0334de7a39a6")
    assert state_sha256(parts) == hashlib.sha256(stored).hexdigest()
    assert state_sha256(parts[::-1]) != state_sha256(parts)
    assert state_sha256([]) == hashlib.sha256(b"").hexdigest()


def test_stored_form(refuses) -> None:  # rule D4
    digest = Digest((0x0102030405060708, 0xFF))
    assert digest.to_bytes() == bytes.fromhex("0807060504030201ff00000000000000")
    assert Digest.from_bytes(digest.to_bytes()) == digest
    assert digests_hex([digest, ZERO]) == "0807060504030201ff00000000000000" + "0" * 32
    assert parse_digests_hex(digests_hex([digest, ZERO])) == (digest, ZERO)
    assert Digest.ZERO == ZERO
    for text in ("0" * 31, "0" * 33, "A" * 32, "g" * 32, " " * 32, "\u0660" * 32):
        with refuses("D4"):
            parse_digests_hex(text)
    with refuses("D4"):
        Digest.from_bytes(b"\0" * 15)
