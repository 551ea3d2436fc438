"""Every sharding layout on real ranks: the union of what ranks report is the true difference, each element once."""

from __future__ import annotations

import pytest

from tests._dist import run_ranks
from tests.capture import scenarios

pytestmark = pytest.mark.dist

FOUR_RANKS = [
    "fsdp-tiny-fp32-transient",  # F42: uneven and empty shards
    "fsdp-tiny-bf16-persistent",
    "hsdp-tiny-fp32-persistent",  # F39
    "hsdp-tiny-bf16-transient",
    "fsdp_tp-tiny-fp32-transient",  # F34, F37
    "fsdp_tp-tiny-bf16-persistent",
    "ddp-tiny-fp32-persistent",
    "ddp-tiny-bf16-transient",
    "ignored-tiny-fp32-persistent",  # F33
    "ignored-tiny-bf16-transient",
    "offload-tiny-fp32-transient",
    "offload-tiny-bf16-persistent",
    "plain-tiny-fp32-transient",
    "plain-tiny-bf16-persistent",
    "fsdp-qwen3_moe-fp32-transient",  # F57: fused experts, six over four ranks
    "hsdp-qwen3_moe-bf16-persistent",
    "fsdp-mixtral-bf16-transient",
    "ddp-mixtral-fp32-persistent",
]
OTHER = ["balance", "copies_differ", "one_rank_refuses", "rank_zero_walks", "all_walk", "accelerate", "late_prepare"]
OTHER += ["unsharded", "partial", "stages", "wrong_offsets", "no_dtensor_operations", "wrapped", "standalone"]
OTHER += ["fsdp1", "contradictory"]


@pytest.fixture(scope="module")
def outcomes():
    return run_ranks(scenarios.matrix, 4, timeout_s=200, names=FOUR_RANKS + OTHER)


@pytest.mark.parametrize("name", FOUR_RANKS + OTHER)
def test_scenario(outcomes, name):
    """Complaints per rank; see `scenarios`."""
    assert [outcome[name] for outcome in outcomes] == [[]] * 4
