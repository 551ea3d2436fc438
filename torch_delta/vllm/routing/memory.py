"""The live memory of a model: every storage that holds parameters or buffers, and what is kept beside them.

Routes write into storages, not into parameters: packed and tied parameters are views, and indices into one flat view of
a storage need no shapes. This module also finds what an in-place write would leave stale: tensors that vLLM derives
from weights once, after loading, such as the packed matrices of CPU linear layers or the split projections of MLA.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from torch_delta.vllm.routing.tracking import storage_id

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from torch import nn

    from torch_delta.codec.bits import Bits

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}


class Storage:
    """One storage of the model, as flat bits.

    Attributes:
        names: runtime names of the tensors in it.
        itemsize: bytes per element.
        flat: all of it, signed integers of the element's width, on its device.
        host: the same memory as a numpy array of unsigned integers; None where it is not host memory.
    """

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.names = [name]
        self.itemsize = tensor.element_size()
        raw = tensor.untyped_storage()
        numel = raw.nbytes() // self.itemsize
        typed = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(raw, 0, (numel,), (1,))
        self.flat: torch.Tensor = typed.view(_SIGNED[self.itemsize])
        self.host: Bits | None = None
        if tensor.device.type == "cpu":
            self.host = self.flat.numpy().view(_UNSIGNED[self.itemsize])

    @property
    def numel(self) -> int:
        """Elements it has room for."""
        return self.flat.numel()

    def to_device(self, array: Bits) -> torch.Tensor:
        """Bits as signed integers on the storage's device."""
        signed = np.ascontiguousarray(array).view(f"<i{self.itemsize}")
        return torch.from_numpy(signed).to(self.flat.device)

    def to_host(self, tensor: torch.Tensor) -> Bits:
        """The inverse of `to_device`."""
        array: Bits = tensor.cpu().numpy().view(_UNSIGNED[self.itemsize])
        return array

    def take(self, index: npt.NDArray[np.int64]) -> Bits:
        """A copy of the bits at flat positions."""
        if self.host is not None:
            found: Bits = self.host.take(index)
            return found
        places = torch.from_numpy(index).to(self.flat.device)
        return self.to_host(self.flat[places])

    def view(self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Bits:
        """A strided region as unsigned bits: the live memory itself on the host, a copy elsewhere."""
        if self.host is None:
            return self.to_host(self.flat.as_strided(shape, strides, offset).contiguous())
        in_bytes = tuple(stride * self.itemsize for stride in strides)
        return np.lib.stride_tricks.as_strided(self.host[offset:], shape, in_bytes)


@dataclass(slots=True)
class _Registered:
    """A registered tensor as it was: what a loader must not exchange for another."""

    holder: dict[str, Any]
    key: str
    name: str
    tensor: torch.Tensor
    data: torch.Tensor
    layout: tuple[Any, ...]


@dataclass(slots=True)
class LiveMemory:
    """All storages of a model.

    Attributes:
        storages: by `tracking.storage_id`. Tensors without memory (meta) are left out.
        names: every registered name, tied ones included.
        shared: registered names whose parameter is also registered under another name.
    """

    storages: dict[int, Storage] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    shared: dict[str, str] = field(default_factory=dict)
    _registered: list[_Registered] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module) -> LiveMemory:
        """Take stock of a model; copies nothing."""
        memory = cls()
        first: dict[int, str] = {}
        for prefix, module in model.named_modules(remove_duplicate=False):
            for holder in (module._parameters, module._buffers):
                for key, tensor in holder.items():
                    if tensor is None or torch.nn.parameter.is_lazy(tensor):
                        continue
                    name = f"{prefix}.{key}" if prefix else key
                    memory._register(holder, key, name, tensor)
                    if first.setdefault(id(tensor), name) != name:
                        memory.shared[name] = first[id(tensor)]
        return memory

    def _register(self, holder: dict[str, Any], key: str, name: str, tensor: torch.Tensor) -> None:
        self.names.add(name)
        data = tensor.detach()
        self._registered.append(_Registered(holder, key, name, tensor, data, _layout(tensor)))
        if tensor.device.type == "meta":
            return
        at = storage_id(tensor)
        known = self.storages.get(at)
        if known is not None:
            known.names.append(name)
        elif tensor.untyped_storage().nbytes() >= tensor.element_size():
            self.storages[at] = Storage(name, tensor)

    def restore(self) -> dict[str, int]:
        """Put back every tensor that was exchanged since; returns the names, with the storage each was given."""
        moved: dict[str, int] = {}
        for entry in self._registered:
            now = entry.holder.get(entry.key)
            if now is not entry.tensor:
                moved[entry.name] = storage_id(now) if isinstance(now, torch.Tensor) else 0
                entry.holder[entry.key] = entry.tensor
            if _layout(entry.tensor) != entry.layout:
                moved[entry.name] = storage_id(entry.tensor)
                entry.tensor.data = entry.data
        return moved


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return storage_id(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def stale_after_writes(model: nn.Module, memory: LiveMemory, loaded: Collection[int]) -> dict[int, str]:
    """Storages that must not be written in place, because something outside them was computed from what they hold.

    What a module keeps beside its loaded weights is taken to depend on all weights in it and below it: there is no way
    to see from which, and a stale copy is silent.

    Args:
        model: the live model.
        memory: of that model.
        loaded: storages that `load_weights` writes.

    Returns:
        By storage, the reason as a sentence.
    """
    found: dict[int, str] = {}
    for prefix, module in model.named_modules():
        where = prefix or type(module).__name__
        why = _keeps(module, memory, loaded)
        if why is None:
            continue
        for tensor in module.parameters():
            if storage_id(tensor) in loaded:
                found.setdefault(storage_id(tensor), f"{where} keeps {why}, which a write in place would leave stale")
    return found


def _keeps(module: nn.Module, memory: LiveMemory, loaded: Collection[int]) -> str | None:
    """What a module holds that may have been computed from its weights, or None."""
    gemm = getattr(module, "cpu_linear", None)
    if gemm is not None and gemm is not torch.nn.functional.linear:
        return "a packed copy of its weight (cpu_linear)"
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.is_floating_point() and parameter.numel() > 1 and storage_id(parameter) not in loaded:
            return f"{name}, which no checkpoint tensor is loaded into"
    for name, tensor in _unregistered(vars(module)):
        if storage_id(tensor) not in memory.storages:
            return f"{name}, a tensor that is no parameter or buffer"
    return None


def _unregistered(attributes: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Floating-point tensors among plain attributes, one container deep; KV caches are not made of weights."""
    for name, value in attributes.items():
        if name.startswith("kv_cache") or name in {"_parameters", "_buffers", "_modules"}:
            continue
        values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        for item in values:
            if isinstance(item, torch.Tensor) and item.is_floating_point() and item.numel() > 1:
                yield name, item
