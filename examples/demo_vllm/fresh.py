"""A new, plain vLLM for every version, started from the checkpoint that was pulled at it.

    python -m examples.demo_vllm.fresh OUT NUM_VERSIONS

Uses nothing of torch_delta. Prints one JSON object per version: greedy completions of the probes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from examples.demo_vllm.settings import PROBE_TOKENS, PROBES

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process is enough here
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_PLUGINS": "none",  # a plain vLLM, without ours
    "VLLM_HOST_IP": "127.0.0.1",
}


def main(out: Path, num_versions: int) -> None:
    """Start a vLLM on every version in turn, and complete the probes."""
    for version in range(num_versions + 1):
        print(json.dumps({"version": version, "greedy": greedy(out / "pulled" / str(version))}), flush=True)


def greedy(folder: Path) -> list[list[int]]:
    """What a vLLM that was just started from `folder` makes of the probes."""
    from vllm import LLM, SamplingParams

    llm = LLM(str(folder), max_model_len=512, enforce_eager=True, kv_cache_memory_bytes=64 << 20)
    wanted = SamplingParams(temperature=0.0, max_tokens=PROBE_TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": list(probe)} for probe in PROBES], wanted, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
