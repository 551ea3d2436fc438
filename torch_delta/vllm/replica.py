"""One rank of an engine that follows a stream: the requests it gets, none of which raises.

    init_weight_transfer_engine ──► init ──► (background) attach
    torch_delta_prepare         ──► prepare ──► (background) prepare
    start_weight_update, update_weights, finish_weight_update ──► start, update, finish
    torch_delta_status, torch_delta_verify

vLLM's ranks answer in queues that go out of step for ever when one of them raises where another does not. So a rank
notes how a request went, and `supervisor` in the engine core asks all of them afterwards and raises there.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from torch_delta.errors import RequestRefused, TorchDeltaError
from torch_delta.vllm.applying import Applier
from torch_delta.vllm.background import Background, Job
from torch_delta.vllm.config import InitInfo, Operator, PrepareInfo, UpdateInfo, parse, resolve
from torch_delta.vllm.host import Host
from torch_delta.vllm.preparing import Preparer
from torch_delta.vllm.records import Failure, Identity, Phase
from torch_delta.vllm.standing import Standing

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from torch_delta.vllm.config import Settings
    from torch_delta.vllm.ranks import Crew
    from torch_delta.vllm.records import Model


class Replica:
    """One rank. Requests come from the worker's thread; `prepare`, `status` and `verify` only look and queue.

    Args:
        crew: all ranks of the engine.
        model: of this rank.
        served: folder or Hub id of the served model, as vLLM was told.
        check_summaries: `routing.check_summaries`.
        operator: what the environment says; by default it is read now.
        cpus: processors the background thread may use.
    """

    def __init__(
        self,
        crew: Crew,
        model: Model,
        served: str,
        check_summaries: Callable[..., None],
        *,
        operator: Operator | None = None,
        cpus: Collection[int] | None = None,
    ) -> None:
        self._served = served
        self._operator = operator if operator is not None else Operator.from_environment()
        self.standing = Standing(Identity(rank=crew.rank, size=crew.size))
        self._applier = Applier(self.standing, crew, model)
        self._preparer = Preparer(
            self.standing,
            model,
            open_host=self._open_host,
            check_summaries=check_summaries,
            cancelled=lambda: self._background.stopped.is_set() or self.standing.untouchable(),
            submit=self._submit,
        )
        self._num_lives = 0
        self._new_background = functools.partial(Background, self.standing, crew, self._preparer.do, cpus=cpus)
        self._background = self._new_background(name="0")
        if self._operator.stream is not None:
            self.init({})

    def _open_host(self, settings: Settings) -> Host:
        return Host(settings, self._served, self.standing.identity.consumer_id)

    def _submit(self, job: Job) -> None:
        self._background.submit(job)

    # -- requests ---------------------------------------------------------------------------------------------------

    def init(self, request: object) -> None:
        """Follow a stream from now on; the same request again only tries again what failed."""
        if self._background.stopped.is_set():
            self._num_lives += 1
            self._background = self._new_background(name=str(self._num_lives))
        with self._noting("init"):
            settings = resolve(parse(InitInfo, request), self._operator, self._served)
            standing = self.standing
            if standing.session:
                raise RequestRefused("a weight update is in progress; finish it before another init")
            if settings != standing.settings:
                standing.begin(settings)
            standing.clear("init", "attach", "prepare")
            if standing.host is None:
                self._background.submit(Job("attach"))

    def start(self) -> None:
        """An update session begins."""
        with self._noting("apply"):
            self.standing.session = True
            self.standing.failed_update = False

    def update(self, request: object) -> None:
        """Bring the live weights to a version."""
        with self._noting("apply"):
            self.standing.clear("apply")
            try:
                self._applier.apply(parse(UpdateInfo, request))
            except BaseException:
                self.standing.failed_update = True
                raise
            self.standing.failed_update = False

    def finish(self) -> None:
        """The update session ends; refuses to call a failed one finished."""
        standing = self.standing
        failed, standing.failed_update = standing.failed_update, False
        standing.session = False
        if not failed:
            standing.outcome = None
            standing.stale_cache = ""
        elif standing.outcome is None:
            standing.outcome = standing.fail("finish", RequestRefused("the update of this session failed"))

    def prepare(self, request: object) -> dict[str, Any]:
        """Start to prepare a version in the background."""
        try:
            info: PrepareInfo = parse(PrepareInfo, request)
            if self.standing.settings is None:
                raise RequestRefused(
                    "this engine follows no stream; send init_weight_transfer_engine with init_info, or set "
                    "TORCH_DELTA_STREAM"
                )
        except TorchDeltaError as error:
            return {"accepted": False, "error": Failure.of("prepare", error).to_json()}
        self.standing.clear("attach", "prepare")
        self.standing.num_asked += 1
        number = self.standing.num_asked
        self._background.submit(Job("prepare", info.version, info.timeout_s, number, info.stream_id))
        host = self.standing.host
        if host is not None:
            host.look_up()
        return {"accepted": True, "target": info.version, "request": number}

    def verify(self) -> dict[str, Any]:
        """Start to digest all live weights in the background."""
        if self.standing.settings is None:
            refused = RequestRefused("this engine follows no stream; there is nothing to verify")
            return {"accepted": False, "error": Failure.of("verify", refused).to_json()}
        self.standing.clear("verify")
        self.standing.verifying = True
        self._background.submit(Job("verify"))
        return {"accepted": True}

    def status(self) -> dict[str, Any]:
        """Where this rank stands, as JSON."""
        return self.standing.status()

    def outcome(self) -> dict[str, Any]:
        """How the last init, start, update or finish went."""
        failure = self.standing.outcome
        return {
            "rank": self.standing.identity.rank,
            "ok": failure is None,
            "error": failure.to_json() if failure is not None else None,
            "session": self.standing.session,
            "version": self.standing.version,
        }

    def stale_cache(self, reason: str) -> None:
        """The engine core could not drop what was computed with older weights."""
        self.standing.stale_cache = reason

    def weights_lost(self, reason: str) -> None:
        """Somebody takes the live weights away, or puts others in their place."""
        self.standing.spoil(lost=reason)

    def sleeps(self) -> None:
        """The memory of the live weights goes away."""
        self.standing.sleep()

    def wakes(self) -> None:
        """It is back."""
        self.standing.asleep = ""

    def close(self) -> None:
        """Stop the background thread and let go of the stream and the working copy; `init` starts over."""
        self._background.stop()
        self.standing.begin(None)

    @contextlib.contextmanager
    def _noting(self, phase: Phase) -> Iterator[None]:
        """Note how a request went; nothing gets out."""
        self.standing.outcome = None
        try:
            yield
        except Exception as error:
            self.standing.outcome = self.standing.fail(phase, error)
