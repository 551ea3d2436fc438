"""A toy model as a dict of tensors, and a run of one trainer rank over it with one server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.skyrl.checkpoints import write
from tests.skyrl.receivers import Receiver

if TYPE_CHECKING:
    from pathlib import Path


def toy(seed: int = 0, dtype: str = "bfloat16") -> dict[str, Any]:
    import torch

    torch.manual_seed(seed)
    shapes = {"model.embed_tokens.weight": (48, 16), "model.norm.weight": (16,), "lm_head.weight": (48, 16)}
    shapes |= {f"model.layers.{n}.mlp.weight": (32, 16) for n in range(3)}
    return {name: torch.randn(shape).to(getattr(torch, dtype)) for name, shape in shapes.items()}


def step(tensors: dict[str, Any], seed: int) -> None:
    """A few elements of every tensor move."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        flat = tensor.view(-1)
        index = torch.randint(flat.numel(), (5,), generator=generator)
        flat[index] += 1.0


class Run:
    """A trainer of one rank and its servers."""

    def __init__(self, folder: Path, tensors: dict[str, Any], base: Path | None = None, **delta: Any) -> None:
        from tests.skyrl.trainers import build, weight_source

        self.folder, self.tensors = folder, tensors
        self.base = base if base is not None else write(folder / "base", tensors)
        self.stream = delta.pop("sync_dir", folder / "stream")
        host = folder / "host" if delta.pop("shared", True) else None
        self.server: Receiver = delta.pop("server") if "server" in delta else Receiver(host)
        self.walks: list[int] = []
        self.engine = build(
            self.base, self.stream, [self.server.url], weight_source(tensors, self.walks), folder=folder, **delta
        )

    def send(self) -> int:
        self.engine.send_weights()
        return self.engine.version

    def end(self) -> None:
        """The trainer ends, its server stays."""
        from tests.skyrl.trainers import end

        end(self.engine)

    def close(self) -> None:
        self.end()
        self.server.__exit__()
