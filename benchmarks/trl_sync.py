"""A synchronisation of TRL's GRPO trainers: deltas against all parameters, in the same run.

    python benchmarks/trl_sync.py                       # 87M parameters; a server, then vLLM in the trainer's process
    python benchmarks/trl_sync.py --part colocated      # one of the two
    python benchmarks/trl_sync.py --small --rounds 1    # does the script still run?

Needs trl and a vLLM on CPU in this environment.

Server (AsyncGRPOTrainer, `vllm serve` on this machine): TRL's own full path is NCCL, which has no CPU side. In its
place stands a dense publish of every parameter through the same stream: every tensor whole in every version, and the
server reloads all weights through its loader (`FleetConfig(mode="reload")`). A round is a fresh run of each way from
the base, in an order that swaps; the first synchronisation of a run is left out, because it builds what later ones use.

Colocated (GRPOTrainer with vLLM in its process): TRL's own path runs here, each parameter through `load_weights`. Both
ways follow each other at every synchronisation of one run, on the same engine: ours, then TRL's own, which writes the
same weights again. In that order, because ours compares the weights it finds with the version before.

Both parts: fp32 masters, Adam, learning rate 1e-6, bf16 served.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measure import machine, median_ratio, table

if TYPE_CHECKING:
    from collections.abc import Sequence

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "examples")]  # the tests' server and rollouts, the examples' model
DELTAS, EVERYTHING, TRL = "deltas", "everything", "TRL's own"
COLUMNS = ("stored_bytes", "changed", "publish_s", "prepare_s", "pause_s", "sync_s")
Row = dict[str, float]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("server", "colocated"), help="default: both")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each way against a server")
    parser.add_argument("--syncs", type=int, default=4, help="of each run, besides the first")
    parser.add_argument("--small", action="store_true", help="the tiny model, and nothing to learn from its numbers")
    parser.add_argument("--work", type=Path, help="folder for the model, the streams and the server's copy")
    parser.add_argument("--json", type=Path, help="write everything measured here")
    options = parser.parse_args(arguments)
    os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
    from tests.vllm.engines import prepare_environment

    prepare_environment()
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        work = Path(folder)
        model = _model(work, small=options.small)
        result: dict[str, Any] = {
            "machine": machine(),
            "model_bytes": sum(path.stat().st_size for path in model.glob("*.safetensors")),
        }
        if options.part != "colocated":
            result["server"] = server(model, work, rounds=options.rounds, syncs=options.syncs)
        if options.part != "server":
            result["colocated"] = colocated(model, work, syncs=options.syncs)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    _show(result)


def _model(work: Path, *, small: bool) -> Path:
    from grpo.tiny_chat import make

    shape = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 10}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64}
    return make(work / "model", **({} if small else shape | heads))


# -- against a server --------------------------------------------------------------------------------------------------


def server(model: Path, work: Path, *, rounds: int, syncs: int) -> dict[str, list[Row]]:
    """What each synchronisation cost, by way."""
    from tests.vllm.servers import Server

    found: dict[str, list[Row]] = {DELTAS: [], EVERYTHING: []}
    with Server(
        model,
        log=work / "server.log",
        dev=True,  # what TRL itself asks a server
        environment={"TORCH_DELTA_CHECKPOINT_ROOT": str(work / "server"), "TORCH_DELTA_ALLOWED_PATHS": str(work)},
        options={"served-model-name": str(model), "logprobs-mode": "processed_logprobs"},
    ) as served:
        for number in range(rounds):
            for way in (DELTAS, EVERYTHING) if number % 2 == 0 else (EVERYTHING, DELTAS):
                found[way] += _train(way, work / f"stream-{way}-{number}", model, work, served.url, syncs)
    return found


def _train(way: str, stream: Path, model: Path, work: Path, url: str, syncs: int) -> list[Row]:
    """Train from the base with one way of synchronising; what each synchronisation but the first cost."""
    from transformers import TrainerCallback

    from tests.trl.trainers import async_trainer

    sync = _delta_sync(way, stream, model)
    rows: list[Row] = []

    class Collect(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            os.sync()  # nobody pays for the writes of the synchronisation before

        def on_step_end(self, *_: Any, **__: Any) -> None:
            rows.append(_row(sync.last))

    trainer = async_trainer(
        model, work / "out", sync, url=url, max_steps=syncs + 1, learning_rate=1e-6, lr_scheduler_type="constant"
    )
    trainer.add_callback(Collect())
    trainer.train()
    return rows[1:]


def _row(report: Any) -> Row:
    published, delivery = report.published, report.delivery
    return {
        "stored_bytes": published.stored_bytes,
        "changed": published.num_changed / published.num_elements,
        "capture_s": published.step_s + published.capture_s,
        "publish_s": published.total_s,
        "prepare_s": delivery.prepare_s,
        "pause_s": delivery.pause_s,
        "sync_s": report.total_s,
    }


def _delta_sync(way: str, stream: Path, model: Path) -> Any:
    import torch_delta
    from torch_delta.capture.tensorsource import TensorSource
    from torch_delta.codec.change import Change
    from torch_delta.config import PublishConfig
    from torch_delta.publish.base import open_base
    from torch_delta.vllm.fleet.config import FleetConfig
    from torch_delta_trl import DeltaSync

    if way == DELTAS:
        return DeltaSync(stream, base=model)

    class Everything(TensorSource):
        """Every tensor whole in every version, whatever changed."""

        def collect(self) -> Any:
            before = self.digests()
            collected = super().collect()
            after = self.digests()
            changes = tuple(
                Change.resend(
                    own.tensor, own.box, self.read(own.tensor, own.box), after[own.tensor] - before[own.tensor]
                )
                for own in self.owned
            )
            return replace(collected, changes=changes)

    class Dense(DeltaSync):
        def _attach(self, model: Any, base: str) -> Any:
            source = Everything(model.named_parameters, open_base(base).schema)
            return torch_delta.attach_source(source, self._root, base=base, config=self._publish)

    return Dense(stream, base=model, publish=PublishConfig(encodings=("dense",)), fleet=FleetConfig(mode="reload"))


# -- in the trainer's process ------------------------------------------------------------------------------------------


def colocated(model: Path, work: Path, *, syncs: int) -> dict[str, list[Row]]:
    """What each synchronisation cost, by way."""
    from trl.generation import vllm_generation

    from tests.trl.trainers import grpo_trainer
    from torch_delta_trl import DeltaSync

    os.environ |= {"TORCH_DELTA_CHECKPOINT_ROOT": str(work / "host"), "TORCH_DELTA_ALLOWED_PATHS": str(work)}
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, enforce_eager=True)  # else minutes of compiling
    trainer = grpo_trainer(
        model,
        work / "out",
        DeltaSync(work / "stream-colocated", base=model),
        max_steps=syncs + 2,  # the last step is not generated with
        learning_rate=1e-6,
        lr_scheduler_type="constant",
    )
    found: dict[str, list[Row]] = {DELTAS: [], TRL: []}
    generation = trainer.vllm_generation
    ours = generation.sync_weights

    def both() -> None:
        os.sync()
        ours()
        report = trainer.delta_sync.last
        os.sync()
        started = time.perf_counter()
        type(generation).sync_weights(generation)
        theirs_s = time.perf_counter() - started
        if report.version > 1:  # the first version builds what later ones use, on both sides
            found[DELTAS].append(_row(report))
            found[TRL].append({"pause_s": theirs_s, "sync_s": theirs_s})

    generation.sync_weights = both
    trainer.train()
    return found


# -- what a person reads -----------------------------------------------------------------------------------------------


def _show(result: dict[str, Any]) -> None:
    for part in ("server", "colocated"):
        if part not in result:
            continue
        ways = result[part]
        rows = [[way, *(_middle(found, column) for column in COLUMNS)] for way, found in ways.items()]
        ours, theirs = ways.values()
        rows.append(["ours / theirs", *(_ratio(ours, theirs, column) for column in COLUMNS)])
        print(f"\n{part}: {result['model_bytes']:,} bytes of bf16 weights; medians of {len(ours)} synchronisations\n")
        print(table(("way", *COLUMNS), rows))


def _middle(found: Sequence[Row], column: str) -> str:
    if column not in found[0]:
        return "-"
    values = [row[column] for row in found]
    middle = statistics.median(values)
    if column == "stored_bytes":
        return f"{middle:,.0f}"
    return f"{middle:.2%}" if column == "changed" else f"{middle:.3f} ({min(values):.3f}-{max(values):.3f})"


def _ratio(ours: Sequence[Row], theirs: Sequence[Row], column: str) -> str:
    if column == "changed" or column not in theirs[0]:
        return "-"
    return f"{median_ratio([row[column] for row in ours], [row[column] for row in theirs]):.3f}"


if __name__ == "__main__":
    main()
