"""A synchronisation of TRL's AsyncGRPOTrainer: deltas against all parameters, through the same stream code and server.

    python benchmarks/trl_sync.py                    # 30M parameters, 3 rounds of 4 synchronisations each way
    python benchmarks/trl_sync.py --small --rounds 1 # does the script still run?

Needs trl and a vLLM on CPU in this environment. TRL's own full path is NCCL, which has no CPU side. In its place:

- deltas: as `DeltaSync` does it: what changed, encoded as it is smallest, written into the live weights.
- everything: each changed tensor whole (`encodings=("dense",)`; a step of Adam leaves none unchanged), and the server
  reloads all weights through its loader (`FleetConfig(mode="reload")`).

Both are the real trainer (fp32 masters, learning rate 1e-6, made-up rollouts, so that training itself costs little) and
one `vllm serve` on this machine. A round is a fresh run of each from the base, in an order that swaps; the first
synchronisation of a run is left out, because it builds what later ones use.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measure import machine, table

if TYPE_CHECKING:
    from collections.abc import Sequence

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "examples")]  # the tests' server and rollouts, the examples' model
SIDES = ("deltas", "everything")


def run(side: str, number: int, *, model: Path, url: str, work: Path, syncs: int) -> list[dict[str, float]]:
    """Train from the base with one way of synchronising; what each synchronisation but the first cost."""
    from tests.trl.trainers import async_trainer
    from torch_delta import PublishConfig
    from torch_delta.vllm.fleet.config import FleetConfig
    from torch_delta_trl import DeltaSync

    whole = side == "everything"
    sync = DeltaSync(
        work / f"stream-{side}-{number}",
        base=model,
        publish=PublishConfig(encodings=("dense",)) if whole else None,
        fleet=FleetConfig(mode="reload") if whole else None,
    )
    trainer = async_trainer(
        model, work / "out", sync, url=url, max_steps=syncs + 1, learning_rate=1e-6, lr_scheduler_type="constant"
    )
    found: list[dict[str, float]] = []
    trainer.add_callback(_collect(sync, found))
    trainer.train()
    return found[1:]


def _collect(sync: Any, found: list[dict[str, float]]) -> Any:
    from transformers import TrainerCallback

    class Collect(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            del args, state, control, kwargs
            report = sync.last
            found.append(
                {
                    "bytes": report.published.stored_bytes,
                    "changed": report.published.num_changed / report.published.num_elements,
                    "sync_s": report.total_s,
                    "publish_s": report.published.total_s,
                    "prepare_s": report.delivery.prepare_s,
                    "pause_s": report.delivery.pause_s,
                }
            )

    return Collect()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--syncs", type=int, default=4, help="of each run, besides the first")
    parser.add_argument("--small", action="store_true", help="the tiny model, and nothing to learn from its numbers")
    parser.add_argument("--work", type=Path, help="folder for the model, the streams and the server's copy")
    parser.add_argument("--json", type=Path, help="write everything measured here")
    options = parser.parse_args(arguments)
    os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}

    from grpo.tiny_chat import make
    from tests.vllm.servers import Server

    shape = {} if options.small else {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    if not options.small:
        shape |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        work = Path(folder)
        model = make(work / "model", **shape)
        found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        with Server(
            model,
            log=work / "server.log",
            dev=True,
            environment={
                "TORCH_DELTA_CHECKPOINT_ROOT": str(work / "server"),
                "TORCH_DELTA_ALLOWED_PATHS": str(work),
            },
            options={"served-model-name": str(model), "logprobs-mode": "processed_logprobs"},
        ) as server:
            for number in range(options.rounds):
                for side in SIDES if number % 2 == 0 else reversed(SIDES):
                    found[side] += run(side, number, model=model, url=server.url, work=work, syncs=options.syncs)
        model_bytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    if options.json is not None:
        result = {"machine": machine(), "model_bytes": model_bytes, "rounds": options.rounds, "syncs": found}
        options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    columns = ("bytes", "changed", "publish_s", "prepare_s", "pause_s", "sync_s")
    rows = [[side, *(_middle(found[side], column) for column in columns)] for side in SIDES]
    print(f"{model_bytes:,} bytes of bf16 weights; medians of {len(found['deltas'])} synchronisations\n")
    print(table(("synchronising", *columns), rows))


def _middle(found: Sequence[dict[str, float]], column: str) -> str:
    value = statistics.median(one[column] for one in found)
    if column == "bytes":
        return f"{value:,.0f}"
    return f"{value:.2%}" if column == "changed" else f"{value:.3f}"


if __name__ == "__main__":
    main()
