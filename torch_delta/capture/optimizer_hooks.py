"""Seeing every optimizer step, whatever the optimizer looks like, without touching it.

Hooks go through `register_step_pre_hook` and `register_step_post_hook`; the step method is never replaced (LR
schedulers need it bound). A subclass whose `step` calls `super().step()` fires its hooks twice, and a step that raises
fires the first hook without the second: both show up as "a step began while one was open". They are told apart by
looking whether the open step is still on the call stack.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch

from torch_delta.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

_REASON = "torch_delta reads the weights here; compile the optimizer step without fullgraph=True"


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer that really steps: under Accelerate and similar wrappers, whose own hooks do not work.

    Raises:
        CaptureError: there is no torch optimizer with step hooks inside.
    """
    inner = optimizer
    for _ in range(8):
        wrapped = next(
            (
                candidate
                for candidate in (getattr(inner, "optimizer", None), getattr(inner, "optim", None))
                if isinstance(candidate, torch.optim.Optimizer)
            ),
            None,
        )
        if wrapped is None:
            break
        inner = wrapped
    if not isinstance(inner, torch.optim.Optimizer) or not hasattr(inner, "_optimizer_step_pre_hooks"):
        raise CaptureError(
            f"{type(optimizer).__name__} is not a torch.optim.Optimizer with step hooks, nor a wrapper around one with "
            "an `optimizer` attribute; its steps cannot be seen. Pass the torch optimizer itself, or use a TensorSource"
        )
    return inner


def refuse_unseen_steps(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse optimizers whose updates happen where hooks do not see them.

    Raises:
        CaptureError: optimizer in backward, or a step compiled with `fullgraph=True`.
    """
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if _is_fullgraph(getattr(optimizer, "step", None)):
            raise CaptureError(
                f"{kind}.step is compiled with fullgraph=True, which forbids the hooks capture needs; {_REASON}"
            )
        in_backward = isinstance(getattr(optimizer, "optimizer_dict", None), dict)
        for parameter in _parameters(optimizer):
            if in_backward or getattr(parameter, "_in_backward_optimizers", None) or _steps_in_backward(parameter):
                raise CaptureError(
                    f"{kind}: parameters are updated during backward (optimizer-in-backward), so there is no step to "
                    "compare around. Use an ordinary optimizer step, or publish from a TensorSource"
                )


class StepHooks:
    """Calls back around every complete step of some optimizers. Threads: that of `optimizer.step`.

    Args:
        optimizers: unwrapped.
        before: called with the optimizer's number before its outermost step.
        after: called with the optimizer's number after its outermost step.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        before: Callable[[int], None],
        after: Callable[[int], None],
    ) -> None:
        self._optimizers = tuple(optimizers)
        self._depths = [0] * len(self._optimizers)
        self._before = before
        self._after = after
        self._handles = []
        for number, optimizer in enumerate(self._optimizers):
            enter = _uncompiled(functools.partial(self._enter, number))
            leave = _uncompiled(functools.partial(self._leave, number))
            self._handles.append(optimizer.register_step_pre_hook(enter))
            self._handles.append(optimizer.register_step_post_hook(leave))

    def is_stepping(self) -> bool:
        """Whether a step is in progress on this thread's stack (a closure is running, say)."""
        return any(
            depth > 0 and _is_on_stack(optimizer)
            for depth, optimizer in zip(self._depths, self._optimizers, strict=True)
        )

    def remove(self) -> None:
        """Take the hooks off. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter(self, number: int, *_: Any) -> None:
        if self._depths[number] and not _is_on_stack(self._optimizers[number]):
            self._depths[number] = 0  # the open step raised
        self._depths[number] += 1
        if self._depths[number] == 1:
            self._before(number)

    def _leave(self, number: int, *_: Any) -> None:
        if self._depths[number] == 0:
            return  # hooks were registered while a step was running
        self._depths[number] -= 1
        if self._depths[number] == 0:
            self._after(number)


def _uncompiled(function: Callable[..., None]) -> Callable[..., None]:
    """Keep the compiler out of a hook, and say why where it would have to be let in."""
    disable: Any = torch.compiler.disable

    def hook(*args: Any) -> None:
        function(*args)

    try:
        wrapped: Callable[..., None] = disable(hook, reason=_REASON)
    except TypeError:  # torch before `reason`
        wrapped = disable(hook)
    return wrapped


def _is_on_stack(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a `step` method of this very optimizer is running on this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "step" and code.co_argcount and frame.f_locals.get(code.co_varnames[0]) is optimizer:
            return True
        frame = frame.f_back
    return False


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _is_fullgraph(step: Any) -> bool:
    """Whether a step method is the product of `torch.compile(..., fullgraph=True)`."""
    function = getattr(step, "__func__", step)
    if not hasattr(function, "_torchdynamo_orig_callable"):
        return False
    cells = getattr(function, "__closure__", None) or ()
    return any(getattr(cell.cell_contents, "fullgraph", False) is True for cell in cells if _is_filled(cell))


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # an empty cell raises
    except ValueError:
        return False
    return True


def _steps_in_backward(parameter: torch.Tensor) -> bool:
    """Whether a post-accumulate-grad hook of the parameter can reach an optimizer."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return any(_reaches_optimizer(hook) for hook in hooks.values())


def _reaches_optimizer(hook: Any) -> bool:
    function = getattr(hook, "func", hook)
    owner = getattr(function, "__self__", None)
    function = getattr(function, "__func__", function)
    cells = getattr(function, "__closure__", None) or ()
    code = getattr(function, "__code__", None)
    scope = getattr(function, "__globals__", {})
    reachable = [cell.cell_contents for cell in cells if _is_filled(cell)]
    reachable += [scope[name] for name in (code.co_names if code is not None else ()) if name in scope]
    reachable += [owner, *getattr(hook, "args", ()), *(getattr(hook, "keywords", None) or {}).values()]
    for value in reachable:
        members = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
        if any(isinstance(member, torch.optim.Optimizer) for member in members):
            return True
    return False
