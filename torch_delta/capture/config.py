"""How a model is captured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from torch_delta.capture.placement import Placement
from torch_delta.errors import CaptureError

Mode = Literal["auto", "transient", "persistent"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureConfig:
    """Options of a `Capture`; the defaults suit a publisher that publishes every step.

    Raises:
        CaptureError: a value or a combination makes no sense.
    """

    mode: Mode = "auto"
    """`transient` copies the bits before each step and compares after it: no bytes per parameter between steps.
    `persistent` keeps a copy (itemsize bytes per owned element) and compares at a collect only: no cost per step, and
    out-of-band changes keep their old bits. `auto` is transient for weights on an accelerator that are collected every
    step, else persistent, which reads the weights once per collect where transient reads them four times per step;
    except that a copy larger than half the free memory is not kept. `policy.py` has the rule and the formulas."""
    steps_per_collect: int = 1
    """Optimizer steps expected between two collects; only `auto` reads it."""
    placement: Placement = field(default_factory=Placement)
    """Where a persistent copy lives."""
    serving_dtype: torch.dtype | None = torch.bfloat16
    """Without a base schema: dtype in which floating-point parameters are published; buffers and other dtypes keep
    theirs. None keeps every dtype. With a base schema the checkpoint decides and this is not read."""
    exclude: tuple[str, ...] = ()
    """Shell-style patterns of canonical model names that are not published although they are trained (value heads)."""
    constant: tuple[str, ...] = ()
    """Shell-style patterns of checkpoint names the model does not hold and that therefore never change (multi-token
    prediction layers a trainer does not instantiate). Nobody owns their elements."""

    def __post_init__(self) -> None:
        """Check values and combinations."""
        if self.mode not in {"auto", "transient", "persistent"}:
            raise CaptureError(f"unknown capture mode {self.mode!r}; expected auto, transient or persistent")
        if self.steps_per_collect < 1:
            raise CaptureError(f"steps_per_collect must be at least 1, got {self.steps_per_collect}")
        if self.mode == "transient" and self.placement != Placement():
            raise CaptureError("capture mode 'transient' keeps no snapshot, so it takes no placement")

    @property
    def has_placement(self) -> bool:
        """Whether a persistent copy was given a place of its own."""
        return self.placement != Placement()
