"""Real vLLM models of every family: several versions by index writes, bit for bit what a fresh load of the last gives.

Each lane is one process (or two ranks) that runs all its cases, since importing vLLM costs more than all of them.
F54-F75 of the field cases are about exactly this: names, fused layouts, experts, tied and padded embeddings.
"""

from __future__ import annotations

import pytest

from tests._dist import run_ranks
from tests.vllm import model_ranks
from tests.vllm.tiny import ALWAYS_TIED, NEVER_TIED, write_checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

FAMILIES = ("qwen2", "qwen3", "llama", "gemma2", "qwen3_moe", "mixtral")


def write(folder, label, family, engine=None, **options):
    return [label, str(write_checkpoint(folder / label, family, **options)), engine or {}]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """Results of all one-rank cases."""
    folder = tmp_path_factory.mktemp("one")
    cases = []
    for family in FAMILIES:
        if family not in ALWAYS_TIED:
            cases.append(write(folder, f"{family}", family))
        if family not in NEVER_TIED:
            cases.append(write(folder, f"{family}-tied", family, tied=True))
    cases.append(write(folder, "llama-head-64", "llama", head_dim=64, num_key_value_heads=1))
    cases.append(write(folder, "qwen3-f32", "qwen3", engine={"dtype": "float32"}, dtype="F32"))
    cases += [write(folder, family, family) for family in ("mamba", "falcon")]
    cases.append(write(folder, "llama-packed", "llama", engine={"delta": False, "dtype": "float32"}, dtype="F32"))
    cases.append(write(folder, "mixtral-packed", "mixtral", engine={"delta": False}))
    (found,) = run_ranks(model_ranks.check_models, 1, 600.0, cases=cases, folder=str(folder))
    return found


LABELS = [
    "qwen2", "qwen2-tied", "qwen3", "qwen3-tied", "llama", "llama-tied", "llama-head-64", "gemma2-tied", "qwen3_moe",
    "mixtral", "qwen3-f32",
]  # fmt: skip


@pytest.mark.parametrize("label", LABELS)
def test_every_tensor_is_routed_and_equal_to_a_fresh_load(one_rank, label) -> None:
    found = one_rank[label]
    assert found["wrong"] == []
    assert found["unrouted"] == {}
    assert found["ignored"] == []
    assert found["num_routed"] >= 20


def test_a_transformed_tensor_goes_by_the_reload_path(one_rank) -> None:
    found = one_rank["mamba"]
    assert found["wrong"] == []
    assert set(found["unrouted"]) == {f"backbone.layers.{layer}.mixer.A_log" for layer in (0, 1)}
    assert all("converts it from torch.bfloat16" in reason for reason in found["unrouted"].values())


def test_a_tensor_that_is_put_together_anew_goes_by_the_reload_path(one_rank) -> None:
    found = one_rank["falcon"]
    assert found["wrong"] == []
    assert set(found["unrouted"]) == {f"transformer.h.{n}.self_attention.query_key_value.weight" for n in (0, 1)}
    assert all("aten.cat" in reason for reason in found["unrouted"].values())


def test_without_our_backend_packed_linear_weights_are_found_and_not_routed(one_rank) -> None:
    found = one_rank["llama-packed"]
    assert found["wrong"] == []
    assert "model.layers.0.self_attn.o_proj.weight" in found["unrouted"]
    assert "lm_head.weight" in found["unrouted"]


def test_without_our_backend_repacked_experts_are_found_by_the_proof(one_rank) -> None:
    found = one_rank["mixtral-packed"]
    assert found["wrong"] == []
    experts = {name: reason for name, reason in found["unrouted"].items() if "experts" in name}
    assert len(experts) == 2 * 4 * 3
    assert all("do not hold the checkpoint's bits" in reason for reason in experts.values()), experts


def test_unpacked_experts_compute_what_packed_ones_do() -> None:
    ((first, second),) = run_ranks(model_ranks.check_experts, 1, 300.0)
    for differs, greatest in (first, second):
        assert differs <= greatest / 64, "more than rounding to bf16 in another order"


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Results of all cases under tensor parallelism, per rank."""
    folder = tmp_path_factory.mktemp("two")
    cases = [
        write(folder, "qwen2-tied", "qwen2", tied=True, num_key_value_heads=1),  # KV heads on both ranks
        write(folder, "qwen3_moe", "qwen3_moe"),
        write(folder, "mixtral-ep", "mixtral", engine={"enable_expert_parallel": True}),
    ]
    return run_ranks(model_ranks.check_models, 2, 600.0, cases=cases, folder=str(folder), num_ranks=2)


@pytest.mark.dist
@pytest.mark.parametrize("label", ["qwen2-tied", "qwen3_moe", "mixtral-ep"])
def test_two_ranks_write_their_shares_and_count_replicas_once(two_ranks, label) -> None:
    for found in two_ranks:
        assert found[label]["wrong"] == []
        assert found[label]["unrouted"] == {}
        assert found[label]["ignored"] == []
