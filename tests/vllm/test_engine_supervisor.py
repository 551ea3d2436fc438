"""The engine core's side: ranks that never raise, a caller that always hears, and reply queues that stay in step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from torch_delta.errors import ApplyFailed, DigestMismatch, RequestRefused
from torch_delta.vllm.records import Failure
from torch_delta.vllm.supervisor import FINISH, INIT, START, START_DRAFT, UPDATE, supervise

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Ranks:
    """Two ranks as vLLM's executor sees them: replies are taken rank by rank, and not at all after one that raised."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.session = False
        self.failure: Failure | None = None
        self.fails: dict[str, Failure] = {}
        self.stale: str | None = None

    def __call__(self, method: str, *, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> list[Any]:
        self.calls.append(method)
        if method == "torch_delta_outcome":
            return [self._outcome(rank) for rank in range(2)]
        if method == "torch_delta_stale_cache":
            (self.stale,) = args
            return [None, None]
        self.failure = self.fails.pop(method, None)
        if method == START:
            self.session = True
        if method == FINISH:
            self.session = False
        return [None, None]

    def _outcome(self, rank: int) -> dict[str, Any]:
        failure = self.failure if rank == 0 else None
        return {
            "rank": rank,
            "ok": failure is None,
            "error": failure.to_json() if failure is not None else None,
            "session": self.session,
            "version": 3,
        }

    @property
    def asked(self) -> list[str]:
        return [call for call in self.calls if call != "torch_delta_outcome"]


class Core:
    def __init__(self) -> None:
        self.resets: list[bool | Exception] = [True]
        self.num_resets = 0
        self.announced: list[int] = []

    def reset_caches(self) -> bool:
        self.num_resets += 1
        result = self.resets.pop() if self.resets else True
        if isinstance(result, Exception):
            raise result
        return result

    def announce(self, version: int) -> None:
        self.announced.append(version)


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


@pytest.fixture
def core() -> Core:
    return Core()


def failure(error: Exception) -> Failure:
    return Failure.of("apply", error)


def test_an_update_resets_the_caches_and_then_announces(ranks: Ranks, core: Core) -> None:
    """F109."""
    supervise(ranks, core, START, (), {})
    supervise(ranks, core, UPDATE, (), {"update_info": {"version": 3}})
    assert (core.num_resets, core.announced) == (0, [])
    supervise(ranks, core, FINISH, (), {})
    assert (core.num_resets, core.announced) == (1, [3])
    assert ranks.asked == [START, UPDATE, FINISH]


def test_a_failed_update_is_raised_with_its_facts_and_closes_the_session(ranks: Ranks, core: Core) -> None:
    supervise(ranks, core, START, (), {})
    ranks.fails[UPDATE] = failure(DigestMismatch("wrong bits", tensor="a", version=3))
    with pytest.raises(DigestMismatch, match="wrong bits") as caught:
        supervise(ranks, core, UPDATE, (), {"update_info": {"version": 3}})
    assert caught.value.facts == {"tensor": "a", "version": 3}
    assert ranks.asked == [START, UPDATE, FINISH]
    assert not ranks.session
    assert (core.num_resets, core.announced) == (0, [])


def test_an_error_that_is_not_ours_is_told_too(ranks: Ranks, core: Core) -> None:
    ranks.fails[INIT] = failure(ZeroDivisionError("by zero"))
    with pytest.raises(Exception, match="ZeroDivisionError: by zero"):
        supervise(ranks, core, INIT, (), {"init_info": {}})


@pytest.mark.parametrize(
    ("session", "method", "kwargs", "says"),
    [
        (False, UPDATE, {"update_info": {"version": 1}}, "without start_weight_update"),
        (False, FINISH, {}, "without start_weight_update"),
        (True, START, {}, "in progress"),
        (False, START_DRAFT, {}, "draft"),
        (True, UPDATE, {"update_info": [{"version": 1}]}, "one object for all ranks"),
        (True, UPDATE, {}, "one object for all ranks"),
    ],
)
def test_what_workers_would_refuse_one_by_one_never_reaches_them(
    ranks: Ranks, core: Core, *, session: bool, method: str, kwargs: dict[str, Any], says: str
) -> None:
    """A worker that raises leaves the replies of the others in their queues for whoever asks next."""
    ranks.session = session
    with pytest.raises(RequestRefused, match=says):
        supervise(ranks, core, method, (), kwargs)
    assert ranks.asked == []


@pytest.mark.parametrize("result", [False, RuntimeError("remote KV")])
def test_a_cache_that_cannot_be_reset_is_an_error_and_known_to_the_ranks(
    ranks: Ranks, core: Core, result: bool | Exception
) -> None:
    ranks.session = True
    core.resets = [result]
    with pytest.raises(ApplyFailed, match="could not be dropped"):
        supervise(ranks, core, FINISH, (), {})
    assert ranks.stale is not None
    assert core.announced == []
