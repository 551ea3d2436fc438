"""Controls a server by the routes of our endpoint plugin: the pause is driven by the server's own process.

A client that dies, or a connection that breaks, in the middle of `apply` therefore cannot leave a server paused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_delta.errors import ServerRefused
from torch_delta.vllm.fleet.answers import generation_of, workers_of
from torch_delta.vllm.fleet.http import Deadline
from torch_delta.vllm.fleet.wire import Answered, Applied, Goal, Wire, accepted

if TYPE_CHECKING:
    from collections.abc import Mapping

ANSWER_MARGIN_S = 5.0
"""How much longer than the server's own deadlines the client waits, so that the server's explanation arrives."""


class PluginWire(Wire):
    """See the module. Without state."""

    def init(self, init_info: Mapping[str, object], deadline: Deadline) -> None:
        """See `Wire.init`."""
        self.http.call("POST", "/torch_delta/init", phase="init", deadline=deadline, body=dict(init_info))

    def status(self, deadline: Deadline) -> Answered:
        """See `Wire.status`."""
        answer = self.http.call("GET", "/torch_delta/status", phase="status", deadline=deadline)
        said = answer if isinstance(answer, dict) else {}
        workers = workers_of(said.get("workers"), self.http.url)
        return Answered(
            workers=workers,
            generation=f"{said.get('generation', '')}+{generation_of(workers)}",
            owes_reset=said.get("owes_reset") is True,
            paused=said.get("paused") is True,
        )

    def prepare(self, goal: Goal, timeout_s: float, deadline: Deadline) -> int:
        """See `Wire.prepare`."""
        body = {**goal.as_fields(), "timeout_s": timeout_s, "wait": False}
        answer = self.http.call("POST", "/torch_delta/prepare", phase="prepare", deadline=deadline, body=body)
        return accepted(answer.get("workers") if isinstance(answer, dict) else answer, self.http.url, "prepare")

    def verify(self, deadline: Deadline) -> None:
        """See `Wire.verify`."""
        answer = self.http.call("POST", "/torch_delta/verify", phase="verify", deadline=deadline, body={})
        accepted(answer.get("workers") if isinstance(answer, dict) else answer, self.http.url, "verify")

    def apply(self, goal: Goal, mode: str, *, timeout_s: float, resume_timeout_s: float) -> Applied:
        """See `Wire.apply`."""
        body = {**goal.as_fields(), "mode": mode, "timeout_s": timeout_s, "resume_timeout_s": resume_timeout_s}
        # Twice: it may have to wait for another update, such as the server's own when it applies at once.
        deadline = Deadline(2 * timeout_s + resume_timeout_s + ANSWER_MARGIN_S)
        answer = self.http.call("POST", "/torch_delta/update", phase="update", deadline=deadline, body=body)
        said = answer if isinstance(answer, dict) else {}
        now, pause_s, phases_s = said.get("version"), said.get("pause_s"), said.get("phases_s")
        if not isinstance(now, int) or not isinstance(pause_s, float | int) or not isinstance(phases_s, dict):
            raise ServerRefused(
                f"update: server {self.http.url} answered {str(answer)[:200]!r}; is its torch-delta another release?",
                url=self.http.url,
                phase="update",
                status=None,
            )
        return Applied(version=now, pause_s=float(pause_s), phases_s={str(k): float(v) for k, v in phases_s.items()})

    def release(self, *, resume_timeout_s: float) -> None:
        """Nothing to do: the server's process ends its own pauses."""
