"""Trainers of several ranks: every rank a sender of its own share, without a gather where that can be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests._dist import run_ranks
from tests.skyrl import ranks
from tests.skyrl.checkpoints import read_bits, same, write
from tests.skyrl.receivers import Receiver
from tests.skyrl.toys import toy

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.skyrl, pytest.mark.slow, pytest.mark.dist, pytest.mark.timeout(400)]


@pytest.mark.parametrize("moved", [False, True], ids=["from the base", "from a checkpoint of a run"])
def test_fsdp2_ranks_publish_their_own_shards(tmp_path: Path, moved: bool) -> None:
    base = ranks.write_base(tmp_path / "base")
    numel = sum(bits.size for bits in read_bits(base).values())
    with Receiver(tmp_path / "host") as server:
        arguments = {"base": str(base), "stream": str(tmp_path / "stream"), "url": server.url}
        found = run_ranks(ranks.fsdp_rounds, 2, timeout_s=300, folder=str(tmp_path), moved=moved, **arguments)
        assert [one["versions"] for one in found] == [[1, 2, 3]] * 2
        assert [one["gathers"] for one in found] == [[False] * 3] * 2
        assert sum(one["owned"] for one in found) == numel
        assert all(0.3 * numel < one["owned"] < 0.7 * numel for one in found)
        assert (found[0]["changed"][0] > 0) is moved
        assert found[0]["changed"][1] > 0
        assert same(server.loaded, read_bits(tmp_path / "model-3")) == []


def test_a_tied_pair_under_both_names_goes_on_through_restarts(tmp_path: Path) -> None:
    base = ranks.write_base(tmp_path / "base", tied=True, both_names=True)
    with Receiver(tmp_path / "host") as server:
        arguments = {"base": str(base), "stream": str(tmp_path / "stream"), "url": server.url}
        found = run_ranks(ranks.fsdp_rounds, 2, timeout_s=300, folder=str(tmp_path), moved=False, **arguments)
        assert [one["versions"] for one in found] == [[1, 2, 3]] * 2
        wanted = read_bits(tmp_path / "model-3")
        assert {"lm_head.weight", "model.embed_tokens.weight"} < wanted.keys()
        assert same(server.loaded, wanted) == []
        # Trained otherwise than the stream's newest version: walked once, then by shards again.
        found = run_ranks(ranks.fsdp_rounds, 2, timeout_s=300, folder=str(tmp_path), moved=True, **arguments)
        assert [one["versions"] for one in found] == [[4, 5, 6]] * 2
        assert same(server.loaded, read_bits(tmp_path / "model-3")) == []


@pytest.mark.parametrize("only_first", [False, True], ids=["every rank", "rank 0 alone"])
def test_any_source_is_shared_out_between_the_ranks_that_can_iterate_it(tmp_path: Path, only_first: bool) -> None:
    base = write(tmp_path / "base", toy())
    numel = sum(bits.size for bits in read_bits(base).values())
    with Receiver(tmp_path / "host") as server:
        arguments = {"base": str(base), "stream": str(tmp_path / "stream"), "url": server.url}
        found = run_ranks(
            ranks.source_rounds, 2, timeout_s=300, folder=str(tmp_path), only_first=only_first, **arguments
        )
        assert [one["version"] for one in found] == [2, 2]
        assert sum(one["owned"] for one in found) == numel
        assert [one["walks"] for one in found] == ([2, 0] if only_first else [2, 2])
        assert (found[1]["owned"] == 0) is only_first
        assert same(server.loaded, read_bits(tmp_path / "wanted")) == []
