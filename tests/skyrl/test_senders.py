"""SkyRL 0.3.0, the real package: its selection, worker code, configuration and client, with our strategy and sender."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests._dist import run_ranks
from tests.skyrl import older, ranks
from tests.skyrl.checkpoints import read_bits, same
from tests.skyrl.receivers import Receiver
from torch_delta.errors import RequestRefused
from torch_delta_skyrl.environment import DeltaSettings

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.skyrl,
    pytest.mark.skipif(
        os.environ.get("TORCH_DELTA_LANE") != "skyrl" and not older.FOLDER.is_dir(),
        reason="SkyRL 0.3.0 is not unpacked here; scripts/install_skyrl.py does it",
    ),
]

PAUSE = "/pause?mode=keep&clear_cache=false"
ROUND = [PAUSE, "/resume", "/fetch_weights", PAUSE, "/start_weight_update", "/update_weights", "/finish_weight_update"]
ROUND += ["/reset_prefix_cache", "/resume"]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(500)
def test_senders_of_all_ranks_publish_their_share_and_start_again(tmp_path: Path) -> None:
    base = ranks.write_base(tmp_path / "base")
    numel = sum(bits.size for bits in read_bits(base).values())
    with Receiver() as server:
        arguments = {"base": str(base), "stream": str(tmp_path / "stream"), "url": server.url, "folder": str(tmp_path)}
        found = run_ranks(older.sender_rounds, 2, timeout_s=220, num_rounds=2, seed=1, **arguments)
        assert [one["release"] for one in found] == ["0.3.0"] * 2
        assert [one["strategy"] for one in found] == ["torch_delta_skyrl.senders"] * 2
        assert [one["versions"] for one in found] == [[1, 2]] * 2
        assert min(found[0]["changed"]) > 0
        assert sum(one["owned"] for one in found) == numel
        assert all(0.3 * numel < one["owned"] < 0.7 * numel for one in found)
        assert server.calls == ["/init_weight_transfer_engine", *ROUND, *ROUND]
        assert same(server.loaded, read_bits(tmp_path / "wanted")) == []
        # A trainer that starts again, from the base and not from where the stream stands.
        found = run_ranks(older.sender_rounds, 2, timeout_s=220, num_rounds=1, seed=7, **arguments)
        assert [one["versions"] for one in found] == [[3], [3]]
        assert server.version == 3
        assert same(server.loaded, read_bits(tmp_path / "wanted")) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_both_selectors_know_delta_and_leave_the_rest_alone() -> None:
    (found,) = run_ranks(older.selections, 1, timeout_s=200)
    assert found["before"] == "BroadcastTransferStrategy", "0.3.0 takes an unknown backend for NCCL without a word"
    assert found["delta"] == "DeltaTransferStrategy"
    assert "external_server_urls" in found["own servers"]
    assert found["nccl"] == ["ipc", "CudaIpcTransferStrategy"]
    assert "colocate_all=false" in found["refused"]


def test_the_environment_is_its_configuration(tmp_path: Path) -> None:
    env = older.settings(tmp_path / "base", "s3://bucket/run", tmp_path)
    found = DeltaSettings.from_environment(env | {"TORCH_DELTA_SKYRL_PUBLISH_NUM_WORKERS": "3"})
    assert (found.sync_dir, found.base_model_path) == ("s3://bucket/run", str(tmp_path / "base"))
    assert (found.publish_num_workers, found.max_file_size_in_gb) == (3, 1.0)
    least = {name: env[name] for name in env if name.endswith(("SYNC_DIR", "BASE_MODEL_PATH"))}
    found = DeltaSettings.from_environment(least | {"XDG_CACHE_HOME": str(tmp_path)})
    assert found.local_checkpoint_dir is None
    assert found.publish_staging_dir.startswith(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"TORCH_DELTA_SKYRL_SYNC_DIR": ""}, "TORCH_DELTA_SKYRL_SYNC_DIR is not set"),
        ({"TORCH_DELTA_SKYRL_SYNCDIR": "/x"}, "unknown variable TORCH_DELTA_SKYRL_SYNCDIR"),
        ({"TORCH_DELTA_SKYRL_PUBLISH_NUM_WORKERS": "two"}, "PUBLISH_NUM_WORKERS is 'two'; expected a number"),
    ],
)
def test_a_variable_that_makes_no_sense_is_named(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    with pytest.raises(RequestRefused, match=message):
        DeltaSettings.from_environment(older.settings(tmp_path, "/stream", tmp_path) | changes)
