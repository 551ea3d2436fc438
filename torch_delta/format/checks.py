"""How the objects of the format refuse bad input: one error per broken rule, with the rule's number and the key."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from torch_delta.errors import FormatError, UnsupportedFormat
from torch_delta.format.digest import parse_digests_hex
from torch_delta.format.limits import (
    FORMAT_VERSION,
    MAX_FEATURES,
    MAX_INFO_ENTRIES,
    MAX_INFO_KEY_BYTES,
    MAX_INFO_VALUE_BYTES,
    MAX_INT,
    SUPPORTED_FEATURES,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch_delta.format.digest import Digest

_HEX: Final = re.compile(r"[0-9a-f]*")
_FEATURE: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


def broken(rule: str, key: str, what: str, **facts: object) -> FormatError:
    """The error for stored bytes (or an object about to be stored) that break a rule of docs/format.md."""
    return FormatError(f"{key}: {what} (rule {rule} of the stream format)", rule=rule, key=key, **facts)


def is_hex(text: str, num_digits: int) -> bool:
    """Whether `text` is exactly `num_digits` lower-case hex digits."""
    return len(text) == num_digits and _HEX.fullmatch(text) is not None


def need_hex(text: str, num_digits: int, *, rule: str, key: str, what: str) -> None:
    """Refuse anything but `num_digits` lower-case hex digits."""
    if not is_hex(text, num_digits):
        raise broken(rule, key, f"{what} must be {num_digits} lower-case hex digits, got {text[:80]!r}")


def need_range(value: int, low: int, high: int, *, rule: str, key: str, what: str) -> None:
    """Refuse an integer outside `[low, high]`."""
    if not low <= value <= high:
        raise broken(rule, key, f"{what} must lie in [{low}, {high}], got {value}", expected=(low, high), got=value)


def check_features(features: Iterable[str], *, key: str) -> None:
    """Refuse what this reader does not know (rule I4).

    Raises:
        FormatError: too many features, or a name outside the grammar.
        UnsupportedFormat: a feature of a later release.
    """
    features = tuple(features)
    if len(features) > MAX_FEATURES or any(_FEATURE.fullmatch(name) is None for name in features):
        raise broken("I4", key, f"required_features holds at most {MAX_FEATURES} names like 'packed', got {features!r}")
    unknown = sorted(set(features) - SUPPORTED_FEATURES)
    if unknown:
        raise UnsupportedFormat(
            f"{key}: needs {', '.join(unknown)}, which this torch_delta does not know; upgrade it (rule I4)",
            rule="I4",
            key=key,
            features=unknown,
        )


def check_info(info: Mapping[str, str], *, key: str) -> None:
    """Bound the informative map, which no reader acts on (rule I6)."""
    if len(info) > MAX_INFO_ENTRIES:
        raise broken("I6", key, f"info has {len(info)} entries, at most {MAX_INFO_ENTRIES} are allowed")
    for name, value in info.items():
        if _num_bytes(name) > MAX_INFO_KEY_BYTES or _num_bytes(value) > MAX_INFO_VALUE_BYTES:
            raise broken(
                "I6",
                key,
                f"info entry {name[:80]!r} is too long: at most {MAX_INFO_KEY_BYTES} bytes of name and "
                f"{MAX_INFO_VALUE_BYTES} of value",
            )


class Fields:
    """Typed access to one JSON object: a missing field or another JSON type breaks rule J6; `true` is not 1.

    Args:
        value: what `json` returned.
        key: the object's key in the store, for messages.
        where: the place inside the object, such as ``parts[3].``; empty at the top.
    """

    __slots__ = ("key", "values", "where")

    def __init__(self, value: object, *, key: str, where: str = "") -> None:
        if type(value) is not dict:
            raise broken("J6", key, f"{where or 'the document'} must be a JSON object, got {_kind(value)}")
        self.values: dict[str, Any] = value
        self.key = key
        self.where = where

    def _get(self, name: str, kind: type, *, nullable: bool = False) -> Any:
        value = self.values.get(name)
        if value is None and nullable:
            return None
        if type(value) is not kind:
            got = _kind(value) if name in self.values else "nothing"
            raise broken("J6", self.key, f"{self.where}{name} must be a JSON {_NAMES[kind]}, got {got}")
        return value

    def text(self, name: str) -> str:
        """A string."""
        return str(self._get(name, str))

    def text_or_none(self, name: str) -> str | None:
        """A string, or null or absent."""
        value: str | None = self._get(name, str, nullable=True)
        return value

    def integer(self, name: str) -> int:
        """An integer that is not negative."""
        value: int = self._get(name, int)
        if value < 0:
            raise broken("J6", self.key, f"{self.where}{name} must not be negative, got {value}")
        return value

    def boolean(self, name: str) -> bool:
        """`true` or `false`."""
        return bool(self._get(name, bool))

    def items(self, name: str, kind: type, *, max_items: int, rule: str) -> list[Any]:
        """A list whose items all have one JSON type."""
        values: list[Any] = self._get(name, list)
        if len(values) > max_items:
            raise broken(rule, self.key, f"{self.where}{name} has {len(values)} items, at most {max_items} are allowed")
        for at, value in enumerate(values):
            if type(value) is not kind:
                raise broken(
                    "J6", self.key, f"{self.where}{name}[{at}] must be a JSON {_NAMES[kind]}, got {_kind(value)}"
                )
        return values

    def text_map(self, name: str) -> dict[str, str]:
        """An object whose values are all strings."""
        values: dict[str, Any] = self._get(name, dict)
        for entry, value in values.items():
            if type(value) is not str:
                raise broken("J6", self.key, f"{self.where}{name}[{entry!r}] must be a JSON string, got {_kind(value)}")
        return values

    def digests(self, name: str) -> tuple[Digest, ...]:
        """Digests in one string (rule D4)."""
        text = self.text(name)
        try:
            return parse_digests_hex(text)
        except FormatError as error:
            raise broken("D4", self.key, f"{self.where}{name}: {error.message}") from error

    def inner(self, name: str) -> Fields:
        """A nested object."""
        return Fields(self._get(name, dict), key=self.key, where=f"{self.where}{name}.")

    def format_version(self) -> None:
        """Refuse another major version; a higher minor only adds what may be ignored (rule I1)."""
        version = self.items("format_version", int, max_items=2, rule="I1")
        if len(version) != 2 or min(version) < 0:
            raise broken("I1", self.key, f"format_version must be [major, minor], got {version!r}")
        if version[0] != FORMAT_VERSION[0]:
            raise UnsupportedFormat(
                f"{self.key}: written in format {version[0]}.{version[1]}, this torch_delta reads "
                f"{FORMAT_VERSION[0]}.x; use a matching release (rule I1)",
                rule="I1",
                key=self.key,
                expected=FORMAT_VERSION[0],
                got=version[0],
            )


_NAMES: Final[dict[type, str]] = {dict: "object", list: "array", str: "string", int: "integer", bool: "boolean"}


def _kind(value: object) -> str:
    return "null" if value is None else _NAMES.get(type(value), type(value).__name__)


def _num_bytes(text: str) -> int:
    # Lone surrogates count here and are refused by rule J7 when the object is stored.
    return len(text.encode("utf-8", "surrogatepass"))


def need_int53(value: int, *, rule: str, key: str, what: str) -> None:
    """Refuse an integer JSON cannot carry exactly, or a negative one."""
    need_range(value, 0, MAX_INT, rule=rule, key=key, what=what)
