"""Sealed JSON: one line of JSON, then the sha256 of that line.

The seal covers stored bytes, so there is no canonical form to recompute. Without it nothing would protect the newest
commit: the hash by which a child names it does not exist yet.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Final, NoReturn

from torch_delta.format.checks import broken
from torch_delta.format.limits import MAX_DEPTH, MAX_INT, MAX_JSON_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

_SEAL_BYTES: Final = 66  # newline, 64 hex digits, newline


def sha256_hex(data: bytes | bytearray | memoryview) -> str:
    """Lower-case hex sha256."""
    return hashlib.sha256(data).hexdigest()


def dump_json(value: Mapping[str, Any], *, key: str) -> bytes:
    """One line of JSON that `load_json` accepts: keys sorted, no spaces, UTF-8, no newline.

    Raises:
        FormatError: the value holds a float, an integer beyond 2**53 - 1, or is nested too deeply.
    """
    _check_tree(value, key, 1)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def load_json(data: bytes | memoryview, *, key: str, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Parse one JSON object under rules J2 to J7.

    Args:
        data: stored bytes, UTF-8.
        key: for messages.
        max_bytes: refused above, before anything is parsed.

    Raises:
        FormatError: a rule is broken.
    """
    if len(data) > max_bytes:
        raise broken("J5", key, f"at most {max_bytes} bytes of JSON are read, got {len(data)}")
    try:
        text = str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise broken("J2", key, f"not UTF-8: {error}") from error

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            seen: set[str] = set()
            twice = next(name for name, _ in items if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise broken("J2", key, f"field {twice!r} appears twice in one object")
        return found

    def no_float(literal: str) -> NoReturn:
        raise broken("J3", key, f"numbers are integers, got {literal[:40]}")

    def integer(literal: str) -> int:
        # Length first: converting a number of a million digits would take quadratic time.
        value = int(literal) if len(literal) <= 17 else MAX_INT + 1
        if not -MAX_INT <= value <= MAX_INT:
            raise broken("J3", key, f"integers lie within +-(2**53 - 1), got {literal[:40]}")
        return value

    try:
        value = json.loads(
            text,
            object_pairs_hook=pairs,
            parse_float=no_float,
            parse_constant=no_float,
            parse_int=integer,
        )
    except RecursionError as error:
        raise broken("J4", key, f"nested more than {MAX_DEPTH} levels") from error
    except json.JSONDecodeError as error:
        raise broken("J2", key, f"not JSON: {error}") from error
    if type(value) is not dict:
        raise broken("J2", key, f"the document must be a JSON object, got {type(value).__name__}")
    _check_tree(value, key, 1)
    return value


def seal(obj: Mapping[str, Any], *, key: str = "object") -> bytes:
    """The stored bytes of a sealed object.

    Args:
        obj: strings, integers, booleans, None, lists and string-keyed dicts of these.
        key: for messages.

    Raises:
        FormatError: the value cannot be stored (a float, an integer too large, nested too deeply).
    """
    line = dump_json(obj, key=key)
    if len(line) + _SEAL_BYTES > MAX_JSON_BYTES:
        raise broken("J5", key, f"{len(line)} bytes of JSON are too many; at most {MAX_JSON_BYTES - _SEAL_BYTES}")
    return line + b"\n" + sha256_hex(line).encode() + b"\n"


def unseal(data: bytes | memoryview, *, key: str, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The object in sealed bytes, after its seal and rules J1 to J7 have been checked.

    Args:
        data: stored bytes.
        key: the object's key, for messages.
        max_bytes: refused above, before anything is hashed or parsed.

    Raises:
        FormatError: a rule is broken; truncated and damaged objects end here.
    """
    if len(data) > max_bytes:
        raise broken("J5", key, f"at most {max_bytes} bytes are read, got {len(data)}")
    line, tail = bytes(data[:-_SEAL_BYTES]), bytes(data[-_SEAL_BYTES:])
    if len(tail) != _SEAL_BYTES or tail != b"\n" + sha256_hex(line).encode() + b"\n":
        raise broken("J1", key, f"the seal does not match: {len(data)} bytes, truncated or damaged")
    if b"\n" in line:
        raise broken("J1", key, "a sealed object has one line of JSON before its seal")
    return load_json(line, key=key, max_bytes=max_bytes)


def _check_tree(value: object, key: str, depth: int) -> None:
    """Walk a value: depth (J4), no floats or large integers (J3), text that is valid Unicode (J7)."""
    kind = type(value)
    if kind is str:
        _check_text(value, key)  # type: ignore[arg-type]
    elif kind is int:
        if not -MAX_INT <= value <= MAX_INT:  # type: ignore[operator]
            raise broken("J3", key, f"integers lie within +-(2**53 - 1), got {value}")
    elif kind is list or kind is tuple:
        if depth > MAX_DEPTH:
            raise broken("J4", key, f"nested more than {MAX_DEPTH} levels")
        for item in value:  # type: ignore[attr-defined]
            _check_tree(item, key, depth + 1)
    elif kind is dict:
        if depth > MAX_DEPTH:
            raise broken("J4", key, f"nested more than {MAX_DEPTH} levels")
        for name, item in value.items():  # type: ignore[attr-defined]
            if type(name) is not str:
                raise broken("J2", key, f"field names are strings, got {name!r}")
            _check_text(name, key)
            _check_tree(item, key, depth + 1)
    elif value is not None and kind is not bool:
        raise broken("J3", key, f"{kind.__name__} {value!r} cannot be stored; use an integer or a string")


def _check_text(text: str, key: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise broken("J7", key, f"a string is not valid Unicode: {error}") from error
