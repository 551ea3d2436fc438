"""Applies every version as soon as all workers have prepared it (TORCH_DELTA_AUTO_APPLY=1), from the API process.

The workers prepare on their own (auto_follow) or when told; they cannot apply, since only this side can pause the
scheduler. Looking costs the engine one message between two steps, a few times a second.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_delta.errors import RequestRefused
from torch_delta.vllm.config import AUTO_APPLY
from torch_delta.vllm.endpoints_requests import Problem

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_delta.vllm.endpoints_control import Controller

logger = logging.getLogger("torch_delta")

_LOOK_S = 0.25
_LONGEST_WAIT_S = 30.0


def wanted(environment: Mapping[str, str]) -> bool:
    """Whether the operator wants versions applied at once.

    Raises:
        RequestRefused: the variable makes no sense.
    """
    value = environment.get(AUTO_APPLY, "0")
    if value not in {"0", "1"}:
        raise RequestRefused(f"{AUTO_APPLY} is {value!r}; expected 0 or 1", field=AUTO_APPLY)
    return value == "1"


@dataclass(slots=True)
class AutoApply:
    """The loop, and what became of it."""

    controller: Controller
    num_applied: int = 0
    """Versions applied by it."""
    failure: str | None = None
    """Of its last attempt; None if that succeeded."""

    async def run(self) -> None:
        """Until cancelled. A failure is kept, logged once, and tried again after a growing wait."""
        wait_s = _LOOK_S
        while True:
            try:
                await self.step()
            except Problem as problem:
                if problem.message != self.failure:
                    logger.warning("applying a version at once failed, trying again: %s", problem.message)
                self.failure = problem.message
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            else:
                self.failure, wait_s = None, _LOOK_S
            await asyncio.sleep(wait_s)

    async def step(self) -> bool:
        """Apply what is ready, if anything is; whether something was.

        Raises:
            Problem: it could not be applied.
        """
        if self.controller.updating:
            return False
        status = await self.controller.status()
        now, prepared = status["version"], status["prepared"]
        if not isinstance(prepared, int) or (isinstance(now, int) and prepared <= now and not status["owes_reset"]):
            return False
        answer = await self.controller.update(prepared)
        applied = answer["pause_s"] != 0.0  # else somebody else was faster
        self.num_applied += applied
        return applied

    def report(self) -> dict[str, object]:
        """For the status."""
        return {"num_applied": self.num_applied, "failure": self.failure}
