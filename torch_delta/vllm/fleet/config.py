"""Options of a fleet, checked where they are given."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

FailurePolicy = Literal["exclude", "raise"]
RoutesChoice = Literal["auto", "plugin", "dev"]
ApplyMode = Literal["auto", "reload"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetConfig:
    """How a fleet treats its servers."""

    on_failure: FailurePolicy = "exclude"
    """`exclude`: a server that fails is named in the report and left out; later updates roll it forward in the
    background, and it takes part again once it has caught up. `raise`: a failure while preparing stops the update
    before any server is paused; a failure while applying is raised after every server was resumed, and the servers that
    did apply keep the version."""
    routes: RoutesChoice = "auto"
    """`plugin`: our routes (server started with VLLM_PLUGINS=torch_delta). `dev`: vLLM's own control routes (server
    started with VLLM_SERVER_DEV_MODE=1). `auto`: our routes if the server has them, else vLLM's."""
    mode: ApplyMode = "auto"
    """`reload` makes every server reload in full instead of writing what changed; one that runs the version too."""
    status_timeout_s: float = 30.0
    """For each quick question: status, init, starting a prepare. Includes waiting behind a step of the engine."""
    prepare_timeout_s: float = 600.0
    """Until every worker of a server has a version fetched, decoded and verified."""
    apply_timeout_s: float = 120.0
    """For the pause of a server: pause, start, update, finish, reset."""
    resume_timeout_s: float = 60.0
    """For ending the pause, tried again and again until then; on top of `apply_timeout_s`."""
    poll_s: float = 0.25
    """Longest time between two looks at a server that prepares, seconds. Every look costs the engine a message between
    two steps."""

    def __post_init__(self) -> None:
        for name, choices in (("on_failure", FailurePolicy), ("routes", RoutesChoice), ("mode", ApplyMode)):
            if getattr(self, name) not in get_args(choices):
                raise ValueError(f"{name}: expected one of {get_args(choices)}, got {getattr(self, name)!r}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_s") and not 0 < value < float("inf"):
                raise ValueError(f"{field.name}: expected a positive number of seconds, got {value!r}")
