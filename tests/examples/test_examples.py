"""The examples run, publish what they trained bit for bit, and are ordinary loops but for one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import deserialize

import torch_delta

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ACCELERATE = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1")

SCRIPTS = ["plain_loop.py", "fsdp2_loop.py", "accelerate_loop.py"]
RUNS = [
    pytest.param("plain_loop.py", (), id="plain"),
    pytest.param("accelerate_loop.py", (), id="accelerate"),
    pytest.param("fsdp2_loop.py", TORCHRUN, id="fsdp2", marks=pytest.mark.dist),
    pytest.param("accelerate_loop.py", ACCELERATE, id="accelerate-ddp", marks=pytest.mark.dist),
]


def run(script: Path, launcher: tuple[str, ...], folder: Path) -> None:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(EXAMPLES),  # for a copy of a script that lies elsewhere
        "HF_HUB_OFFLINE": "1",
    }
    arguments = [str(folder / name) for name in ("base", "stream", "output")]
    done = subprocess.run(
        [sys.executable, *launcher, str(script), *arguments],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        timeout=200,
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def tensors(folder: Path) -> dict[str, tuple[str, bytes]]:
    files = sorted(folder.glob("*.safetensors"))
    return {
        name: (entry["dtype"], bytes(entry["data"])) for file in files for name, entry in deserialize(file.read_bytes())
    }


def as_bf16(fp32: bytes) -> bytes:
    """Round to nearest, ties to even, on the bits; shares nothing with torch or with the code under test."""
    bits = np.frombuffer(fp32, "<u4").astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype("<u2").tobytes()


def our_lines(source: str) -> list[str]:
    return [line for line in source.splitlines() if line.startswith("torch_delta.") or " torch_delta." in line]


@pytest.mark.parametrize("script", SCRIPTS)
def test_one_line_is_ours(script: str) -> None:
    source = (EXAMPLES / script).read_text()
    (line,) = our_lines(source)
    assert line.startswith("torch_delta.attach(optimizer, model, stream, base=base)")
    assert [text for text in source.splitlines() if "torch_delta" in text] == ["import torch_delta", line]


@pytest.mark.slow
@pytest.mark.parametrize(("script", "launcher"), RUNS)
def test_what_is_published_is_what_was_trained(script: str, launcher: tuple[str, ...], tmp_path: Path) -> None:
    run(EXAMPLES / script, launcher, tmp_path)
    checkpoint = torch_delta.LocalCheckpoint(tmp_path / "copy", base=tmp_path / "base")
    reports = list(torch_delta.Follower(str(tmp_path / "stream")).apply_to(checkpoint, until=4, timeout_s=10.0))
    assert reports[-1].version == 4
    assert not (tmp_path / "stream" / "commits" / f"{5:020d}.json").exists()  # as many versions as steps
    base, copy, trained = (tensors(tmp_path / name) for name in ("base", "copy", "output"))
    assert copy.keys() == base.keys()
    assert trained.keys() - base.keys() <= {"lm_head.weight"}  # tied: some ways of saving write it twice
    for name, (dtype, bits) in copy.items():
        assert dtype == "BF16"
        assert bits == as_bf16(trained[name][1]), name
    assert copy != base


@pytest.mark.slow
@pytest.mark.parametrize(("script", "launcher"), RUNS)
def test_without_the_line_it_is_the_same_loop(script: str, launcher: tuple[str, ...], tmp_path: Path) -> None:
    source = (EXAMPLES / script).read_text()
    (line,) = our_lines(source)
    bare = tmp_path / "bare.py"
    bare.write_text(source.replace(line + "\n", "").replace("import torch_delta\n", ""))
    run(bare, launcher, tmp_path)
    assert tensors(tmp_path / "output")
    assert not (tmp_path / "stream").exists()
