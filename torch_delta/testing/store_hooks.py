"""What the store conformance tests share: the hooks that bypass the store, names, and a starting line for races."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import pytest

from torch_delta.errors import TorchDeltaError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch_delta.store.base import Store

T = TypeVar("T")

VERSION = "00000000000000000007"
COMMIT = f"commits/{VERSION}.json"
PART = f"parts/{VERSION}/00000-0000-0123456789abcdef.safetensors"
HOSTILE = [
    "", "/", "/etc/passwd", "../outside", "commits/../../outside", "commits/..", ".", ".hidden", "commits/.tmp-1",
    "commits//x", "commits/", "a\0b", "a\nb", "a b", "a\\b", "a:b", "k\u00e9y", "x" * 600, "COMMITS/x",
    "%2e%2e/x", "~root",
]  # fmt: skip


class StoreHooks(ABC):
    """The way past the store under test, which a subclass provides."""

    num_racers: int = 8
    """Threads in the race tests."""
    big_bytes: int = 24 << 20
    """Size of the large streamed object; above any single-request limit of the backend if it has one."""

    @pytest.fixture
    @abstractmethod
    def store(self) -> Iterator[Store]:
        """A fresh, empty store, closed afterwards."""

    @abstractmethod
    def raw_put(self, store: Store, key: str, data: bytes) -> None:
        """Put an object where the store would, without the store."""

    @abstractmethod
    def raw_get(self, store: Store, key: str) -> bytes | None:
        """Read an object's bytes without the store; None if there is none."""

    def race(self, action: Callable[[int], T]) -> list[T | TorchDeltaError]:
        """`action(racer)` on all racers at once; results or errors by racer."""
        start = threading.Barrier(self.num_racers)

        def run(racer: int) -> T | TorchDeltaError:
            start.wait(60)
            try:
                return action(racer)
            except TorchDeltaError as error:
                return error

        with ThreadPoolExecutor(self.num_racers) as pool:
            return [*pool.map(run, range(self.num_racers))]
