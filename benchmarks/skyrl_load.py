"""How long servers are paused: SkyRL's own engine in vLLM against torch_delta in its seat, through SkyRL's calls.

    DIR/bin/python benchmarks/skyrl_load.py [--layers 8 --width 1024 --density 0.01 --repeats 5] [--json FILE]
    DIR/bin/python benchmarks/skyrl_load.py --trace qwen-lr1e-06-warm-19-20

DIR is an environment with SkyRL and vLLM (scripts/install_skyrl.py). Each side is a process with a real vLLM engine of
one rank, started with SkyRL's backend name and worker extension, and a trainer of one rank that sends to it: a random
Qwen 3, or the model of a trace, whose weights alternate between two values. A round is SkyRL's: fetch, then start,
update and finish, which take the time of the pause and are compared here; SkyRL's engine loads the whole checkpoint
through vLLM's layerwise reload.

Sides take turns going first, and one waits while the other works. After the last round both engines' norms are compared
with what was sent, bit for bit, and our engine must have written changed elements only, without a reload.
On a CPU vLLM repacks weights after a reload, which a GPU does not do.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measure import machine, median_ratio, table
from safetensors import safe_open
from safetensors.torch import save_file
from skyrl_side_by_side import SIDES, prepare
from traces import recorded

Weights = dict[str, torch.Tensor]

_EXTENSION = "skyrl.backends.skyrl_train.inference_servers.new_inference_worker_wrap.NewInferenceWorkerWrap"
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
}


class Client:
    """SkyRL's client protocol over vLLM's offline API.

    Args:
        llm: the engine.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.seconds: dict[str, float] = {}

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def fetch_weights(self, **arguments: Any) -> None:
        self._timed("fetch_s", lambda: self._llm.collective_rpc("fetch_weights", kwargs=arguments))

    def start_weight_update(self) -> None:
        self._timed("start_s", self._llm.start_weight_update)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._timed("update_s", lambda: self._llm.update_weights({"update_info": update_info}))

    def finish_weight_update(self) -> None:
        self._timed("finish_s", self._llm.finish_weight_update)

    def pause_generation(self) -> None:
        """Nothing is generated here."""

    def resume_generation(self) -> None:
        """As above."""

    def _timed(self, name: str, work: Any) -> None:
        started_s = time.perf_counter()
        work()
        self.seconds[name] = time.perf_counter() - started_s


def be_side(name: str, work: Path, controller: Any) -> None:
    """One backend's engine and trainer: each path that is sent becomes a version that is served."""
    os.environ.update(_ENVIRONMENT)
    prepare()
    from skyrl.backends.skyrl_train.weight_sync.delta import trainer
    from vllm import LLM
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    import torch_delta_skyrl.registering
    import torch_delta_skyrl.trainer

    if name == "torch_delta":
        torch_delta_skyrl.registering.register_receiver()
    llm = LLM(
        model=str(work / "base"),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=4,
        kv_cache_memory_bytes=32 << 20,
        enforce_eager=True,
        weight_transfer_config={"backend": "delta"},
        worker_extension_cls=_EXTENSION,
    )
    now = work / "old.safetensors"

    class Source(WeightSource):
        def metadata(self) -> list[Any]:
            return [ParamMeta(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in self]

        def __iter__(self) -> Any:
            with safe_open(now, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 - not a dict
                    yield key, opened.get_tensor(key)

    info = trainer.DeltaTrainerInitInfo(
        base_model_path=str(work / "base"),
        sync_dir=str(work / name / "sync"),
        local_checkpoint_dir=str(work / name / "host"),
        publish_staging_dir=str(work / name / "staging"),
        rank=0,
    )
    of_side = {
        "SkyRL": trainer.DeltaTrainerWeightTransferEngine,
        "torch_delta": torch_delta_skyrl.trainer.TrainerEngine,
    }
    client = Client(llm)
    engine = of_side[name].trainer_init(info, client=client, source=Source())
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    controller.send(type(worker.weight_transfer_engine).__module__)
    while (path := controller.recv()) is not None:
        now = path
        engine.send_weights()
        controller.send(dict(client.seconds))
    live = dict(worker.get_model().named_parameters())
    with safe_open(now, framework="pt") as sent:
        wrong = [
            key
            for key in sent.keys()  # noqa: SIM118 - not a dict
            if key in live
            and "norm" in key
            and not torch.equal(sent.get_tensor(key).view(torch.int16), live[key].detach().view(torch.int16))
        ]
    how = llm.collective_rpc("torch_delta_status")[0]["last_apply"]["kind"] if name == "torch_delta" else "reload"
    controller.send({"wrong": wrong, "how": how})
    engine.shutdown()
    llm.llm_engine.engine_core.shutdown()


def write_weights(arguments: argparse.Namespace, work: Path) -> tuple[int, int]:
    """A base and its two states; numbers of its parameters and of those that change."""
    config, old, new = random_weights(arguments) if arguments.trace is None else of_trace(arguments)
    config.save_pretrained(work / "base")
    for name, weights in (("old", old), ("new", new)):
        save_file(weights, work / f"{name}.safetensors", metadata={"format": "pt"})
    os.link(work / "old.safetensors", work / "base" / "model.safetensors")
    changed = sum(int((old[key].view(torch.int16) != new[key].view(torch.int16)).sum()) for key in old)
    return sum(tensor.numel() for tensor in old.values()), changed


def random_weights(arguments: argparse.Namespace) -> tuple[Any, Weights, Weights]:
    """A random Qwen 3, in which a part of the elements changes anywhere."""
    import transformers

    width = arguments.width
    config = transformers.Qwen3Config(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        head_dim=64,
        vocab_size=16 * width,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    old = {key: tensor.detach() for key, tensor in model.state_dict().items() if key != "lm_head.weight"}
    new = {}
    for key, tensor in old.items():
        new[key] = tensor.clone()
        flat = new[key].view(-1).view(torch.int16)
        flat[torch.randint(flat.numel(), (max(1, int(arguments.density * flat.numel())),))] ^= 1
    return config, old, new


def of_trace(arguments: argparse.Namespace) -> tuple[Any, Weights, Weights]:
    """The weights of a recorded trace of the Qwen 2 family, whose shapes say what the model is."""
    import transformers

    pair = recorded(arguments.traces, arguments.trace)
    shapes = {key: tuple(tensor.shape) for key, tensor in pair.old.items()}
    layer = "model.layers.0"
    config = transformers.Qwen2Config(
        hidden_size=shapes["model.norm.weight"][0],
        intermediate_size=shapes[f"{layer}.mlp.up_proj.weight"][0],
        num_hidden_layers=sum(key.endswith("mlp.up_proj.weight") for key in shapes),
        num_attention_heads=shapes[f"{layer}.self_attn.q_proj.weight"][0] // 64,
        num_key_value_heads=shapes[f"{layer}.self_attn.k_proj.weight"][0] // 64,
        vocab_size=shapes["model.embed_tokens.weight"][0],
        tie_word_embeddings="lm_head.weight" not in shapes,
        architectures=["Qwen2ForCausalLM"],
        dtype="bfloat16",
    )
    return config, pair.old, pair.new


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", default=None, help="name of a recorded trace of the Qwen 2 family")
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"), help="folder of the traces")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--work", type=Path, default=None, help="folder for everything (default: temporary)")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args(argv)
    prepare()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        work = Path(folder)
        total, changed = write_weights(arguments, work)
        sides, processes = {}, []
        for name in SIDES:
            sides[name], there = spawn.Pipe()
            processes.append(spawn.Process(target=be_side, args=(name, work, there)))
            processes[-1].start()
        modules = {name: side.recv() for name, side in sides.items()}
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
        for number in range(arguments.repeats + 1):  # the first is for the hosts' copies, routes and caches
            for name in SIDES if number % 2 else SIDES[::-1]:
                sides[name].send(work / ("old.safetensors" if number % 2 else "new.safetensors"))
                told = sides[name].recv()
                told["load_s"] = told["start_s"] + told["update_s"] + told["finish_s"]
                if number:
                    rounds[name].append(told)
        for name, side in sides.items():
            side.send(None)
            found = side.recv()
            if found["wrong"] or (name == "torch_delta" and found["how"] != "patch"):
                sys.exit(f"{name}: {found}")
        for process in processes:
            process.join(60)
    print(f"{total:,} parameters, {changed / total:.2%} changed; engines: {', '.join(modules.values())}")
    keys = ("fetch_s", "load_s")
    rows = [
        [name, *(f"{1e3 * statistics.median(r[key] for r in rounds[name]):,.0f}" for key in keys)] for name in SIDES
    ]
    ratios = [median_ratio(*([r[key] for r in rounds[name]] for name in SIDES[::-1])) for key in keys]
    print(table(("side", "fetch ms", "load ms"), [*rows, ["ratio", *(f"{ratio:.2f}" for ratio in ratios)]]))
    if arguments.json is not None:
        found = {"machine": machine(), "num_elements": total, "density": changed / total, "rounds": rounds}
        arguments.json.write_text(json.dumps(found, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
