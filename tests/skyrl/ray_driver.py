"""The driver of a Ray job with two trainer actors, in a process of its own. It never mentions torch_delta."""

from __future__ import annotations

import socket
import sys
import tempfile
import typing
from pathlib import Path
from typing import Any


class Trainer:
    """One rank, as SkyRL's workers are: an actor that joins a process group and builds an engine."""

    def __init__(self, rank: int, port: int) -> None:
        import typing_extensions

        typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]
        import torch

        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=2, rank=rank)
        self.rank = rank

    def train(self, base: str, folder: str, url: str) -> str:
        """Three rounds; returns the module of the engine."""
        import torch
        from skyrl.backends.skyrl_train.weight_sync.sources import FsdpWeightSource

        from tests.skyrl import ranks
        from tests.skyrl.trainers import build, end

        model = ranks.sharded(Path(base))
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        source = FsdpWeightSource(model, torch.bfloat16)
        engine = build(Path(base), Path(folder) / "stream", [url], source, folder=Path(folder), rank=self.rank)
        for number in range(3):
            engine.send_weights()
            ranks.write_gathered(model, Path(folder) / f"model-{number + 1}", rank=self.rank)
            ranks.train(model, optimizer, number)
        end(engine)
        return type(engine).__module__


def main(base: str, folder: str, url: str) -> None:
    import ray

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Ray's sockets need a short path, which a test's folder is not.
    with tempfile.TemporaryDirectory(prefix="ray") as spool:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=spool,
            object_store_memory=80 << 20,
            log_to_driver=True,
        )
        actor: Any = ray.remote(num_cpus=1)(Trainer)
        trainers = [actor.remote(rank, port) for rank in range(2)]
        modules = ray.get([trainer.train.remote(base, folder, url) for trainer in trainers], timeout=400)
        print("engines:", *modules, flush=True)
        ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
