"""A second trainer that is started by mistake, and one that starts again: told apart by signs of life."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from tests.publish import reader
from tests.publish.sources import ArraySource, edit, edited, initial, same, write_checkpoint
from tests.publish.support import config
from torch_delta.errors import Fenced, PublishFailed
from torch_delta.publish import attach_source, pulse
from torch_delta.store import LocalStore
from torch_delta.testing.faults import Fault, FaultyStore, call

if TYPE_CHECKING:
    from pathlib import Path

LIVE = {"alive_s": 3}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "base", initial())


def attached(tmp_path, base, *, store=None, state=None, **changes):
    root = tmp_path / "run"
    return attach_source(
        ArraySource(state=state), str(root) if store is None else store, base=base, config=config(**{**LIVE, **changes})
    )


def publish(publisher, seed: int) -> None:
    edit(publisher._source, seed)
    publisher.publish()
    publisher.wait()


def sign(root: Path) -> dict:
    return reader.sealed(root / "head.json")["sign"]


@pytest.mark.parametrize("state", [None, edited([1])], ids=["behind", "at the head"])
def test_a_live_writer_is_not_disturbed_and_the_second_hears_its_name(tmp_path, base, state) -> None:
    # rule H2: neither a fork nor a commit under the feet of one that trains
    with attached(tmp_path, base) as first:
        publish(first, 1)
        with pytest.raises(Fenced, match="on_restart='takeover'") as caught:
            attached(tmp_path, base, state=state)
        assert f"pid {os.getpid()}" in caught.value.owner
        publish(first, 2)
        assert first.version == 2
    assert not (tmp_path / "run" / "successor.json").exists()
    assert same(reader.replay(tmp_path / "run", initial())[2], edited([1, 2]))


def test_signs_come_also_when_nothing_is_published(tmp_path, base) -> None:
    seen, enough = [], threading.Event()

    def note() -> None:
        seen.append(sign(tmp_path / "run"))
        if len(seen) == 3:
            enough.set()

    store = FaultyStore(
        LocalStore(tmp_path / "run"), [Fault("put_hint", "head.json", effect=call(note, after=True), times=None)]
    )
    with attached(tmp_path, base, store=store, alive_s=1):
        assert enough.wait(30)
    assert [said["seconds"] for said in seen[:3]] == [1, 1, 1]
    assert [said["beat"] for said in seen] == [*range(1, len(seen) + 1)]
    assert len({said["writer"] for said in seen}) == 1
    assert seen[-1]["seconds"] == 0, "and a goodbye at the end"


def test_after_a_goodbye_nobody_waits(tmp_path, base) -> None:
    with attached(tmp_path, base, alive_s=3600) as first:
        publish(first, 1)
    with attached(tmp_path, base, alive_s=3600) as second:  # at version 0: forks at once
        assert second.version == 0
    assert (tmp_path / "run" / "successor.json").exists()
    with pytest.raises(RuntimeError, match="of the loop"), attached(tmp_path, base, alive_s=3600):
        raise RuntimeError("of the loop")
    with attached(tmp_path, base, alive_s=3600):  # also after an error
        pass


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.publish.test_pulse import attached, publish, sign
root = Path(sys.argv[1])
publisher = attached(root, root / "base", alive_s=int(sys.argv[2]))
publish(publisher, 1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def kill_one(tmp_path, alive_s: int) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), str(alive_s)], env=environment, timeout=100, check=False
    )
    assert run.returncode < 0
    assert sign(tmp_path / "run")["seconds"] == alive_s


def test_a_killed_writer_of_this_machine_is_known_to_be_dead(tmp_path, base) -> None:
    kill_one(tmp_path, 3600)
    with attached(tmp_path, base, state=edited([1])) as again:
        publish(again, 2)
    assert not (tmp_path / "run" / "successor.json").exists()
    assert reader.versions(tmp_path / "run") == [1, 2]


def test_a_killed_writer_of_another_machine_is_waited_for(tmp_path, base, monkeypatch) -> None:
    kill_one(tmp_path, 2)
    monkeypatch.setattr(pulse, "_machine", lambda: "another")
    began_s = time.monotonic()
    with attached(tmp_path, base) as again:
        assert again.version == 0
    assert time.monotonic() - began_s < 60
    assert (tmp_path / "run" / "successor.json").exists()


def test_a_sign_that_is_old_by_the_stores_clock_is_not_waited_for(tmp_path, base, monkeypatch) -> None:
    # clocks of hosts may be an hour off: only times of the store are compared
    kill_one(tmp_path, 3000)
    monkeypatch.setattr(pulse, "_machine", lambda: "another")
    head = tmp_path / "run" / "head.json"
    os.utime(head, (head.stat().st_mtime - 3600,) * 2)
    with attached(tmp_path, base) as again:
        assert again.version == 0


def test_takeover_fences_the_live_one_which_hears_by_whom(tmp_path, base) -> None:
    first = attached(tmp_path, base)
    publish(first, 1)
    with attached(tmp_path, base, on_restart="takeover") as second:
        publish(second, 5)
        edit(first._source, 2)
        first.publish()
        with pytest.raises(Fenced, match=r"run-[0-9a-f]{8}"):
            first.wait()
        first.close()
        new = tmp_path / reader.sealed(tmp_path / "run" / "successor.json")["root"]
        assert sign(new)["seconds"] > 0, "the goodbye of a fenced writer ends nobody else's stream"
    assert reader.versions(tmp_path / "run") == [1]
    assert same(reader.replay(new, initial())[1], edited([5]))


def test_two_that_start_at_the_same_moment(tmp_path, base) -> None:
    # W5: neither sees a sign of the other; one wins, the other's error names the winner
    with attached(tmp_path, base, alive_s=0) as first, attached(tmp_path, base, alive_s=0) as second:
        start, ended = threading.Barrier(2), {}

        def run(name: str, publisher, seed: int) -> None:
            edit(publisher._source, seed)
            start.wait(30)
            publisher.publish()
            try:
                publisher.wait()
            except (Fenced, PublishFailed) as error:
                ended[name] = error
            else:
                ended[name] = None

        threads = [
            threading.Thread(target=run, args=(name, publisher, seed))
            for name, publisher, seed in (("first", first, 1), ("second", second, 2))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        winners = [name for name, error in ended.items() if error is None]
        losers = [error for error in ended.values() if error is not None]
        assert len(winners) == len(losers) == 1, ended
        assert isinstance(losers[0], Fenced)
        stored = reader.sealed(tmp_path / "run" / "commits" / f"{1:020d}.json")
        assert stored["info"]["nonce"] in losers[0].owner
    seed = {"first": 1, "second": 2}[winners[0]]
    assert same(reader.replay(tmp_path / "run", initial())[1], edited([seed]))
