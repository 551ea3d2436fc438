"""`gc`: what it deletes of a real directory, and the sentences it says about it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.cli.streams import STREAM_ID, StreamMaker, three_versions
from torch_delta.cli import main
from torch_delta.stream.claim import take_claim

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def maker(tmp_path: Path) -> StreamMaker:
    """Versions 1 to 7, anchors of 3 and 5."""
    made = three_versions(tmp_path / "stream")
    made.anchor()
    for value in (20, 21):
        made.publish({"a.weight": {5: value}})
    made.anchor()
    for value in (22, 23):
        made.publish({"a.weight": {6: value}})
    return made


def commits(maker: StreamMaker) -> list[int]:
    return sorted(int(path.stem) for path in (maker.root / "commits").iterdir())


def test_versions_below_the_older_anchor_go(maker: StreamMaker, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gc", str(maker.root), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "would go: versions 1 to 2, 0 anchors" in said
    assert "stays: everything from the anchor of version 3 on" in said
    assert commits(maker) == [1, 2, 3, 4, 5, 6, 7]
    assert main(["gc", str(maker.root), "--budget", "1"]) == 0
    said = capsys.readouterr().out
    assert "deleted: versions 1 to 2, 0 anchors, 0 orphaned objects, 0 expired leases, " in said
    assert "over the budget: have the writer make anchors more often" in said
    assert commits(maker) == [3, 4, 5, 6, 7]
    assert main(["verify", str(maker.root)]) == 0  # what is left is a whole stream
    capsys.readouterr()
    assert main(["gc", str(maker.root), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["versions"], record["floor"], record["freed_bytes"]) == ([], 3, 0)


def test_with_one_anchor_nothing_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    maker = three_versions(tmp_path / "stream")
    maker.anchor()
    assert main(["gc", str(maker.root)]) == 0
    said = capsys.readouterr().out
    assert "deleted: no version, 0 anchors" in said
    assert "no version goes: there are not two complete anchors yet" in said
    assert commits(maker) == [1, 2, 3]


def test_a_second_deleter_says_who_the_first_is(maker: StreamMaker, capsys: pytest.CaptureFixture[str]) -> None:
    held = take_claim(maker.store, STREAM_ID, seconds=600)
    assert not isinstance(held, str)
    assert main(["gc", str(maker.root)]) == 1
    assert capsys.readouterr().out.startswith("nothing was done: host ")
    assert commits(maker)[0] == 1
    held.release()
    assert main(["gc", str(maker.root)]) == 0
    assert commits(maker)[0] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--keep-anchors", "1"], "1 is too few: at least 2 anchors stay"),
        (["--keep-anchors", "x"], "'x' is no whole number"),
        (["--budget", "-1"], "-1 is negative"),
        (["--grace", "0"], "0 is not a positive number of seconds"),
    ],
)
def test_what_cannot_work_is_refused(
    maker: StreamMaker, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gc", str(maker.root), *options]) == 2
    assert message in capsys.readouterr().err
    assert commits(maker)[0] == 1
