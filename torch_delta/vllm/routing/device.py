"""The write where live memory is not host memory (CUDA): whole targets at a time, with two waits for the device.

All comparisons come before all writes, and all writes before all reads back. Each pass only queues work and adds to one
flag per target, which is looked at once at its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torch_delta import crashpoints
from torch_delta.vllm.routing.kernels import NEW_DIFFERS, OLD_DIFFERS
from torch_delta.vllm.routing.targets import Block, Scatter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class DeviceWrite:
    """One write of targets on devices, which can be taken back.

    Args:
        targets: that hold device arrays.
    """

    def __init__(self, targets: Sequence[Scatter | Block]) -> None:
        self._targets = targets
        self._written = False

    def run(self) -> tuple[Scatter | Block, int, int] | None:
        """Compare, write, read back; the first target that differs, an element of it, and how."""
        if not self._targets:
            return None
        wrong = self._compare(lambda target: _arrays(target)[1])
        if wrong is not None:
            return *wrong, OLD_DIFFERS
        self._written = True
        for target in self._targets:
            crashpoints.reach("vllm.write_job")
            _store(target, _arrays(target)[2])
        wrong = self._compare(lambda target: _arrays(target)[2])
        return None if wrong is None else (*wrong, NEW_DIFFERS)

    def restore(self) -> list[str]:
        """Put the old bits back if any were overwritten; names of storages where they do not read back."""
        if not self._written:
            return []
        for target in self._targets:
            _store(target, _arrays(target)[1])
        wrong = self._compare(lambda target: _arrays(target)[1])
        return [] if wrong is None else [wrong[0].storage.names[0]]

    def _compare(self, expected: Callable[[Scatter | Block], torch.Tensor]) -> tuple[Scatter | Block, int] | None:
        """The first target whose live bits are not `expected`, and the first such element; one wait per device."""
        flags: dict[torch.device, list[torch.Tensor]] = {}
        order: dict[torch.device, list[Scatter | Block]] = {}
        for target in self._targets:
            device = target.storage.flat.device
            flags.setdefault(device, []).append((_live(target) != expected(target)).any())
            order.setdefault(device, []).append(target)
        for device, found in flags.items():
            differs = torch.stack(found)
            if bool(differs.any()):
                target = order[device][int(differs.nonzero()[0, 0])]
                return target, int((_live(target) != expected(target)).reshape(-1).nonzero()[0, 0])
        return None


def _arrays(target: Scatter | Block) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    assert target.device is not None
    return target.device


def _strided(target: Block) -> torch.Tensor:
    return target.storage.flat.as_strided(target.shape, target.strides, target.offset)


def _live(target: Scatter | Block) -> torch.Tensor:
    if isinstance(target, Block):
        return _strided(target)
    index = _arrays(target)[0]
    assert index is not None
    return target.storage.flat.index_select(0, index)


def _store(target: Scatter | Block, value: torch.Tensor) -> None:
    if isinstance(target, Block):
        _strided(target).copy_(value)
        return
    index = _arrays(target)[0]
    assert index is not None
    target.storage.flat.index_copy_(0, index, value)
