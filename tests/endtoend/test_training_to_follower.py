"""The whole path: FSDP2 ranks publish, another process follows, and every version is bit for bit the trainer's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import deserialize

from tests._dist import run_ranks
from tests.endtoend import training

pytestmark = [pytest.mark.dist, pytest.mark.slow]

# Follows in its own interpreter, as users do, and keeps a copy of what it served at every version.
_FOLLOW = """
import json, shutil, sys
import torch_delta
root, base, until = sys.argv[1:]
checkpoint = torch_delta.LocalCheckpoint(root + "/local", base=base or None)
out = []
with torch_delta.Follower(root + "/stream", merge_from=None) as follower:
    for report in follower.apply_to(checkpoint, until=int(until), timeout_s=120.0):
        with checkpoint.reading() as folder:
            shutil.copytree(folder, f"{root}/served/{report.version}", ignore=shutil.ignore_patterns(".torch_delta"))
        out.append([report.version, report.kind, report.num_changed])
checkpoint.verify()
assert "torch" not in sys.modules
print(json.dumps(out))
"""


def follow(root, *, base, until):
    return subprocess.Popen(
        [sys.executable, "-c", _FOLLOW, str(root), str(base) if base is not None else "", str(until)],
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(process):
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 0
    return json.loads(output)


def tensors(*paths):
    return {
        name: (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
        for path in paths
        for name, entry in deserialize(Path(path).read_bytes())
    }


def assert_served_is_what_the_trainer_had(root, version):
    served = tensors(*Path(root, "served", str(version)).glob("*.safetensors"))
    expected = tensors(Path(root, "expected", f"{version}.safetensors"))
    expected = {name: entry for name, entry in expected.items() if name in served}
    assert len(served) == len(expected) > 20
    wrong = [name for name in served if served[name] != expected[name]]
    assert wrong == []


@pytest.mark.parametrize(
    ("kind", "world_size", "options"),
    [
        ("qwen3", 2, {"every": 1, "mode": "transient", "dtype": "float32"}),
        ("qwen3", 4, {"every": 3, "mode": "persistent", "dtype": "bfloat16", "hsdp": True}),
        ("qwen3_moe", 2, {"every": 1, "mode": "persistent", "dtype": "float32"}),  # F57
        ("mixtral", 2, {"every": 2, "mode": "transient", "dtype": "bfloat16"}),
    ],
    ids=["2 ranks, fp32 masters", "HSDP 2x2, bf16, 3 steps a version", "qwen3_moe", "mixtral"],
)
def test_every_version_is_exact_while_training_goes_on(tmp_path, kind, world_size, options):
    training.write_base(tmp_path / "base", kind)
    follower = follow(tmp_path, base=tmp_path / "base", until=3)
    try:
        results = run_ranks(training.train, world_size, root=str(tmp_path), num_versions=3, **options)
        reports = finish(follower)
    finally:
        follower.kill()
        follower.communicate()
    assert results == [results[0]] * world_size  # F02: every rank knows the same versions and counts
    assert results[0][0] == [1, 2, 3]
    assert [version for version, _, _ in reports][-1] == 3
    assert all(kind == "delta" for _, kind, _ in reports)
    for version, _, num_changed in reports:
        assert num_changed == results[0][1][version - 1] > 0
        assert_served_is_what_the_trainer_had(tmp_path, version)
    assert_transformers_opens(tmp_path / "served", [version for version, _, _ in reports])


def assert_transformers_opens(folder, versions):
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    for version in versions:
        model = AutoModelForCausalLM.from_pretrained(folder / str(version), dtype=torch.bfloat16)
        held = tensors(*(folder / str(version)).glob("*.safetensors"))
        is_tied = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
        assert is_tied == ("lm_head.weight" not in held)
        opened = revert_weight_conversion(model, {name: p.detach() for name, p in model.named_parameters()})
        assert held.keys() <= opened.keys()
        for name, (_, _, bits) in held.items():
            assert opened[name].contiguous().view(torch.uint8).numpy().tobytes() == bits, name


def test_a_restarted_trainer_with_another_mesh_continues(tmp_path):
    training.write_base(tmp_path / "base")
    options = {"root": str(tmp_path), "every": 1, "dtype": "bfloat16", "mode": "persistent"}
    run_ranks(training.train, 2, num_versions=2, **options)
    first = finish(follow(tmp_path, base=tmp_path / "base", until=2))
    assert [version for version, _, _ in first] == [1, 2]
    results = run_ranks(
        training.train, 3, num_versions=1, first_version=2, resume_from=str(tmp_path / "served" / "2"), **options
    )
    assert results[0][0] == [3]
    assert [report[0] for report in finish(follow(tmp_path, base=None, until=3))] == [3]
    for version in (1, 2, 3):
        assert_served_is_what_the_trainer_had(tmp_path, version)


def test_a_trainer_at_other_weights_is_refused(tmp_path):
    """F86, F98: told to, a trainer that does not hold what the stream holds is refused, on every rank."""
    training.write_base(tmp_path / "base")
    options = {"root": str(tmp_path), "every": 1, "dtype": "bfloat16", "mode": "persistent", "num_versions": 1}
    options["on_restart"] = "refuse"
    run_ranks(training.train, 2, **options)
    with pytest.raises(AssertionError, match="BaseMismatch"):
        run_ranks(training.train, 2, resume_from=str(tmp_path / "base"), first_version=1, **options)
    # The refused attach left nothing behind: the stream is still readable at version 1.
    assert [report[0] for report in finish(follow(tmp_path, base=tmp_path / "base", until=1))] == [1]
    assert_served_is_what_the_trainer_had(tmp_path, 1)


def test_without_a_base_the_stream_starts_at_an_anchor(tmp_path):
    training.write_base(tmp_path / "base")
    assert run_ranks(training.train_without_base, 2, root=str(tmp_path)) == [1, 1]
    reports = finish(follow(tmp_path, base=None, until=1))
    assert reports[0][1] == "anchor"
    for version, _, _ in reports:
        assert_served_is_what_the_trainer_had(tmp_path, version)
    assert_transformers_opens(tmp_path / "served", [version for version, _, _ in reports])
