"""A trainer that starts again at, before or after the last version, on another mesh, or while another one lives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.publish import reader
from tests.publish.sources import ArraySource, edit, edited, initial, rows, same, write_checkpoint
from tests.publish.support import config, open_rank, run_threads
from torch_delta import crashpoints
from torch_delta.errors import BaseMismatch, ChainError, Fenced
from torch_delta.publish import attach_source
from torch_delta.publish.base import open_base
from torch_delta.receive import Follower, LocalCheckpoint
from torch_delta.store import LocalStore
from torch_delta.store.sibling import sibling_url
from torch_delta.store.url import open_store
from torch_delta.store.waiting import poll
from torch_delta.stream import Stream
from torch_delta.stream.lineages import fork_root, walk

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "base", initial())


def train(url: Path | str, base: Path | None, seeds: list[int], *, state=None, **changes) -> ArraySource:
    """Attach, and publish one version per seed."""
    source = ArraySource(state=state)
    with attach_source(source, str(url), base=base, config=config(**changes)) as publisher:
        for seed in seeds:
            edit(source, seed)
            publisher.publish()
            publisher.wait()
    return source


def lineages(root: Path) -> list[Path]:
    """Folders of a stream and its successors, without the package's own walk."""
    found = [root]
    while (found[-1] / "successor.json").exists():
        found.append(found[-1].parent / reader.sealed(found[-1] / "successor.json")["root"])
    return found


def test_at_the_last_version_the_stream_goes_on(tmp_path, base) -> None:
    train(tmp_path / "run", base, [1, 2])
    train(tmp_path / "run", base, [3], state=edited([1, 2]))
    assert lineages(tmp_path / "run") == [tmp_path / "run"]
    assert same(reader.replay(tmp_path / "run", initial())[3], edited([1, 2, 3]))


@pytest.mark.parametrize("at", [0, 1, 2])
def test_before_the_last_version_a_lineage_is_forked(tmp_path, base, at: int) -> None:
    # rules N1, N2, N3, N4, I3, A2; F86, F98: never on top of versions that are given up
    train(tmp_path / "run", base, [1, 2, 3])
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    train(tmp_path / "run", base, [7], state=edited([1, 2, 3][:at]))
    old, new = lineages(tmp_path / "run")
    assert {path: path.read_bytes() for path in before} == before, "history is never rewritten (F106)"
    successor, stream = reader.sealed(old / "successor.json"), reader.sealed(new / "stream.json")
    assert (successor["version"], successor["successor_id"]) == (at, stream["stream_id"])
    old_id = reader.sealed(old / "stream.json")["stream_id"]
    assert (stream["base"]["kind"], stream["base"]["name"], stream["base"]["revision"]) == ("stream", old_id, str(at))
    assert same(reader.replay(new, edited([1, 2, 3][:at]))[1], edited([*[1, 2, 3][:at], 7]))
    assert len(list((new / "anchors").glob(f"{0:020d}-*.json"))) == 1, "version 0 can be had by anybody"


def test_after_the_last_version_a_lineage_starts_at_an_anchor(tmp_path, base) -> None:
    # the trainer's own checkpoint is ahead of what was committed
    train(tmp_path / "run", base, [1, 2])
    train(tmp_path / "run", base, [5], state=edited([1, 2, 3, 4]))
    old, new = lineages(tmp_path / "run")
    assert reader.sealed(old / "successor.json")["version"] == 2
    assert reader.sealed(new / "stream.json")["base"]["kind"] == "anchor"
    assert same(reader.replay(new, edited([1, 2, 3, 4]))[1], edited([1, 2, 3, 4, 5]))


def test_the_url_stays_the_same_over_many_restarts(tmp_path, base) -> None:
    train(tmp_path / "Run 7", base, [1, 2])
    train(tmp_path / "Run 7", base, [3], state=edited([1]))
    train(tmp_path / "Run 7", base, [4], state=edited([1, 3]))  # where the second lineage stands
    train(tmp_path / "Run 7", base, [5], state=edited([1]))  # its version 0
    found = lineages(tmp_path / "Run 7")
    assert len(found) == 3
    assert [path.name.startswith("run-7-") for path in found] == [False, True, True]
    assert len({len(path.name) for path in found[1:]}) == 1, "names do not grow"
    assert [reader.versions(path) for path in found] == [[1, 2], [1, 2], [1]]


@pytest.mark.parametrize(("before", "after"), [(3, 2), (1, 3)])
def test_another_mesh_forks_as_well(tmp_path, base, before: int, after: int) -> None:
    root = tmp_path / "run"

    def rank_main(rank, team, seeds, state):
        source = ArraySource(state=state, owned=rows(rank, team.world_size))
        with open_rank(rank, team, root, source=source, base=open_base(base)) as publisher:
            for seed in seeds:
                edit(source, seed)
                publisher.publish()
                publisher.wait()

    run_threads(before, lambda rank, team: rank_main(rank, team, [1, 2], None))
    run_threads(after, lambda rank, team: rank_main(rank, team, [9], edited([1])))
    _, new = lineages(root)
    assert same(reader.replay(new, edited([1]))[1], edited([1, 9]))


def test_a_writer_that_still_lives_is_fenced_and_hears_by_whom(tmp_path, base) -> None:
    # rule N3, W5: exactly one goes on
    source = ArraySource()
    old = attach_source(source, str(tmp_path / "run"), base=base, config=config())
    edit(source, 1)
    old.publish()
    old.wait()
    train(tmp_path / "run", base, [2])
    edit(source, 3)
    old.publish()
    new = lineages(tmp_path / "run")[1]
    with pytest.raises(Fenced, match=new.name) as caught:
        old.wait()
    assert reader.sealed(new / "stream.json")["stream_id"] in caught.value.owner
    with pytest.raises(Fenced):
        old.publish()
    old.close()
    assert reader.versions(tmp_path / "run") == [1]
    assert reader.versions(new) == [1]


def test_refusing_is_a_choice(tmp_path, base) -> None:
    train(tmp_path / "run", base, [1, 2])
    with pytest.raises(BaseMismatch, match=r"which are those of version 1: .*on_restart='fork'"):
        train(tmp_path / "run", base, [3], state=edited([1]), on_restart="refuse")
    assert lineages(tmp_path / "run") == [tmp_path / "run"]


def test_retention_that_took_the_newest_commit_is_no_obstacle(tmp_path, base) -> None:
    # a deleter of another release may follow rule A6 less closely
    source = ArraySource()
    with attach_source(source, str(tmp_path / "run"), base=base, config=config()) as publisher:
        edit(source, 1)
        publisher.publish()
        publisher.anchor()
    for path in (tmp_path / "run" / "commits").iterdir():
        path.unlink()
    train(tmp_path / "run", base, [2], state=edited([1]))
    assert lineages(tmp_path / "run") == [tmp_path / "run"]
    assert reader.versions(tmp_path / "run") == [2]


def test_where_the_newest_version_cannot_be_read_the_writer_says_how_to_go_on(tmp_path, base) -> None:
    source = ArraySource()
    with attach_source(source, str(tmp_path / "run"), base=base, config=config()) as publisher:
        edit(source, 1)
        publisher.publish()
        publisher.anchor()
    for path in [*(tmp_path / "run" / "commits").iterdir(), *(tmp_path / "run" / "anchors").glob("*.json")]:
        path.write_bytes(path.read_bytes()[:-5]) if path.parent.name == "anchors" else path.unlink()
    with pytest.raises(ChainError, match=r"neither the commit nor an anchor of version 1.* publish to a new URL"):
        train(tmp_path / "run", base, [2], state=edited([1]))
    train(tmp_path / "new", None, [2], state=edited([1]))
    assert reader.versions(tmp_path / "new") == [1]


def test_nobody_waits_for_anybody_when_both_start_again(tmp_path, base) -> None:
    # F95: the trainer says where it is before its first step, and readers need neither it nor each other
    train(tmp_path / "run", base, [1, 2], alive_s=60)
    (tmp_path / "run" / "head.json").unlink()
    source = ArraySource(state=edited([1, 2]))
    with attach_source(source, str(tmp_path / "run"), base=base, config=config(alive_s=60)) as publisher:
        assert publisher.version == 2
        head = tmp_path / "run" / "head.json"  # the first sign of life, given by a thread of its own
        poll(lambda: head.exists() or None, phase="the first sign of life", peer="the writer", timeout_s=30)
        assert reader.sealed(head)["version"] == 2, "announced, and nothing was published"
        late = LocalCheckpoint(tmp_path / "late", base=base)
        with Follower(str(tmp_path / "run")) as follower:
            seen = [report.version for report in follower.apply_to(late, until=2, timeout_s=20)]
            assert seen[-1] == 2
        with Follower(str(tmp_path / "run")) as follower:
            edit(source, 3)
            assert publisher.publish() == 3
            publisher.wait()
            assert [report.version for report in follower.apply_to(late, until=3, timeout_s=20)] == [3]
    assert lineages(tmp_path / "run") == [tmp_path / "run"]


def test_followers_change_over_by_themselves(tmp_path, base) -> None:
    # rule N5
    train(tmp_path / "run", base, [1, 2, 3])
    places = {}
    for at in (1, 2, 3):  # before the fork, at it, and beyond it
        places[at] = LocalCheckpoint(tmp_path / f"at-{at}", base=base)
        with Follower(str(tmp_path / "run")) as follower:
            list(follower.apply_to(places[at], until=at))
    train(tmp_path / "run", base, [7, 8], state=edited([1, 2]))
    new = lineages(tmp_path / "run")[1]
    places[0] = LocalCheckpoint(tmp_path / "at-0")  # an empty one
    seen = {}
    for at, checkpoint in places.items():
        with Follower(str(tmp_path / "run")) as follower:
            reports = list(follower.apply_to(checkpoint, until="head", timeout_s=20))
        seen[at] = [(report.kind, report.version) for report in reports]
        assert checkpoint.stream_id == reader.sealed(new / "stream.json")["stream_id"]
        assert checkpoint.version == 2
        with checkpoint.reading() as folder:
            assert same(reader.folder(folder, _table()), edited([1, 2, 7, 8]))
        checkpoint.verify()
        assert [patch.version for patch in checkpoint.patches(0)] == [1, 2]
    after = [("delta", 1), ("delta", 2)]
    assert seen == {
        1: [("delta", 2), ("successor", 0), *after],
        2: [("successor", 0), *after],
        3: [("anchor", 0), *after],
        0: [("anchor", 0), *after],
    }
    # A receiver that starts again with the old URL finds its lineage.
    with Follower(str(tmp_path / "run")) as follower:
        assert list(follower.apply_to(LocalCheckpoint(tmp_path / "at-1"), until="head", timeout_s=20)) == []


def test_a_follower_that_waits_changes_over(tmp_path, base) -> None:
    train(tmp_path / "run", base, [1, 2])
    checkpoint = LocalCheckpoint(tmp_path / "place", base=base)
    seen = []
    with Follower(str(tmp_path / "run"), poll_interval_s=0.01, most_poll_interval_s=0.02) as follower:
        for report in follower.apply_to(checkpoint, timeout_s=30):
            seen.append((report.kind, report.version))
            if len(seen) == 2:
                train(tmp_path / "run", base, [4, 5], state=edited([1]))
            if len(seen) == 5:
                follower.stop()
    assert seen == [("delta", 1), ("delta", 2), ("anchor", 0), ("delta", 1), ("delta", 2)]
    assert follower.stream.store.url.endswith(lineages(tmp_path / "run")[1].name)


def test_a_follower_hears_of_versions_that_another_one_reached_in_the_next_lineage(tmp_path, base) -> None:
    """F107: one process of a host does the work, and all of them hear of it; version numbers may be the same again."""
    train(tmp_path / "run", base, [1])
    checkpoint = LocalCheckpoint(tmp_path / "place", base=base)
    quick = {"poll_interval_s": 0.01, "most_poll_interval_s": 0.02}
    with Follower(str(tmp_path / "run"), **quick) as watching, Follower(str(tmp_path / "run")) as working:
        reports = watching.apply_to(checkpoint, timeout_s=30)
        first = next(reports)
        assert (first.kind, first.version) == ("delta", 1)
        train(tmp_path / "run", base, [2], state=edited([7]))
        new_id = reader.sealed(lineages(tmp_path / "run")[1] / "stream.json")["stream_id"]
        assert [r.version for r in working.apply_to(checkpoint, until="head", timeout_s=30)] == [0, 1]
        heard = next(reports)
        assert (heard.kind, heard.version, heard.stream_id) == ("shared", 1, new_id)


def test_a_follower_that_begins_late_hears_where_the_checkpoint_is(tmp_path, base) -> None:
    train(tmp_path / "run", base, [1])
    old_id = reader.sealed(tmp_path / "run" / "stream.json")["stream_id"]
    checkpoint = LocalCheckpoint(tmp_path / "place", base=base)
    with Follower(str(tmp_path / "run")) as follower:
        list(follower.apply_to(checkpoint, until="head"))
    known = (old_id, 1)  # what somebody noted before the copy was moved on by another process
    train(tmp_path / "run", base, [2], state=edited([7]))
    new_id = reader.sealed(lineages(tmp_path / "run")[1] / "stream.json")["stream_id"]
    with Follower(str(tmp_path / "run")) as follower:
        list(follower.apply_to(checkpoint, until="head", timeout_s=30))
    with Follower(str(tmp_path / "run")) as follower:
        (heard,) = follower.apply_to(checkpoint, until="head", timeout_s=30, since=known)
    assert (heard.kind, heard.from_version, heard.version, heard.stream_id) == ("shared", 1, 1, new_id)
    with Follower(str(tmp_path / "run")) as follower:
        assert list(follower.apply_to(checkpoint, until="head", timeout_s=30, since=(new_id, 1))) == []


def test_several_lineages_later(tmp_path, base) -> None:
    train(tmp_path / "run", base, [1, 2])
    checkpoint = LocalCheckpoint(tmp_path / "place", base=base)
    with Follower(str(tmp_path / "run")) as follower:
        list(follower.apply_to(checkpoint, until="head"))
    train(tmp_path / "run", base, [3], state=edited([1, 2, 99]))
    train(tmp_path / "run", base, [4], state=edited([5]))
    assert len(lineages(tmp_path / "run")) == 3
    with Follower(str(tmp_path / "run")) as follower:
        list(follower.apply_to(checkpoint, until="head", timeout_s=20))
    with checkpoint.reading() as folder:
        assert same(reader.folder(folder, _table()), edited([5, 4]))


def _table() -> list[dict]:
    from tests.publish.test_anchors import TABLE

    return TABLE


RESTART = """
import sys
from tests.publish.test_restart import train
from tests.publish.sources import edited
from pathlib import Path
root = Path(sys.argv[1])
train(root / "run", root / "base", [7], state=edited([1]))
"""


def kill_while_forking(folder: Path, crash: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", RESTART, str(folder)],
        env={**os.environ, crashpoints.ENVIRONMENT: f"{crash}:1:kill", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == -9, run.stderr


@pytest.mark.parametrize(
    ("crash", "is_forked"),
    [
        ("publish.fork_noted", False),
        ("publish.anchor_file_put", False),
        ("publish.anchor_manifest_put", False),
        ("stream.info_written", False),
        ("publish.lineage_created", False),
        ("publish.successor_written", True),
        ("publish.committed", True),
    ],
)
def test_killed_while_forking(tmp_path, base, crash: str, is_forked: bool) -> None:
    # nothing committed is lost, nothing half-made is followed
    train(tmp_path / "run", base, [1, 2])
    kill_while_forking(tmp_path, crash)
    assert (len(lineages(tmp_path / "run")) == 2) == is_forked
    checkpoint = LocalCheckpoint(tmp_path / "place", base=base)
    with Follower(str(tmp_path / "run")) as follower:
        list(follower.apply_to(checkpoint, until="head", timeout_s=20))
    with checkpoint.reading() as folder:
        expected = edited([1, 2] if not is_forked else [1, 7] if crash == "publish.committed" else [1])
        assert same(reader.folder(folder, _table()), expected)
    train(tmp_path / "run", base, [8], state=edited([1]))
    with Follower(str(tmp_path / "run")) as follower:
        list(follower.apply_to(checkpoint, until="head", timeout_s=20))
    with checkpoint.reading() as folder:
        assert same(reader.folder(folder, _table()), edited([1, 8]))


def files(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("crash", "begun"),
    [
        ("publish.fork_noted", set()),
        ("publish.anchor_file_put", {"anchors"}),
        ("publish.anchor_manifest_put", {"anchors"}),
        ("stream.schema_written", {"anchors", "schema"}),
        ("stream.info_written", {"anchors", "schema", "stream.json"}),
        ("publish.lineage_created", {"anchors", "schema", "stream.json"}),
    ],
)
def test_what_a_killed_fork_left_is_found_and_deleted(tmp_path, base, capsys, crash: str, begun: set[str]) -> None:
    # rules N6, L6: the dry run shows it, the real one removes it, and nothing of any other stream
    from torch_delta.cli import main

    run, neighbour = tmp_path / "run", tmp_path / "run-other"
    train(run, base, [1, 2])
    train(neighbour, base, [3])
    kill_while_forking(tmp_path, crash)
    (note,) = (run / "forks").iterdir()
    orphan = tmp_path / reader.sealed(note)["root"]
    assert {path.parts[0] for path in files(orphan)} == begun if begun else not orphan.exists()

    def gc(*options: str) -> list[dict]:
        assert main(["gc", str(run), "--json", *options]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    left = files(orphan)
    (said,) = gc()
    assert (said["forks"], files(orphan)) == ([], left), "it may be alive"
    for path in [note, *orphan.rglob("*")]:
        os.utime(path, (1, 1))
    others = files(neighbour)
    train(run, base, [8], state=edited([1]))  # starts again, and forks under another name
    live = lineages(run)[1]
    alive, old = files(live), files(run)
    said, of_live = gc("--dry-run", "--grace", "86400")
    assert (said["forks"], of_live["forks"], files(orphan)) == ([orphan.name], [], left)
    assert (files(run), said["dry_run"]) == (old, True)
    done, of_live = gc("--grace", "86400")
    assert (done["forks"], of_live["forks"]) == ([orphan.name], [])
    assert files(orphan) == {}
    assert [*run.glob("forks/*")] == []
    without_claims = {path: data for path, data in files(live).items() if path.parts[0] != "claims"}
    assert (without_claims, files(neighbour)) == (alive, others)
    assert [item["forks"] for item in gc("--grace", "0.001")] == [[], []], "what is followed stays, however old"
    with Follower(str(run)) as follower:
        checkpoint = LocalCheckpoint(tmp_path / "place", base=base)
        list(follower.apply_to(checkpoint, until="head", timeout_s=20))
    with checkpoint.reading() as folder:
        assert same(reader.folder(folder, _table()), edited([1, 8]))


@pytest.mark.parametrize(
    ("url", "root", "expected"),
    [
        ("s3://bucket/runs/run-7", "run-8", "s3://bucket/runs/run-8"),
        ("s3://bucket/run-7", "a/b", "s3://bucket/a/b"),
        ("file:///tmp/a%20b/run", "run-1", "file:///tmp/a%20b/run-1"),
        ("memory://x", "y", "memory://y"),
        ("memory://x/y", "z", "memory://x/z"),
        ("hf://buckets/me/name/run", "run-1", "hf://buckets/me/name/run-1"),
        ("s3://bucket", "run", None),
        ("hf://buckets/me/name", "run", None),
        ("file:///", "run", None),
    ],
)
def test_where_a_sibling_lies(url: str, root: str, expected: str | None) -> None:
    # rule N2
    if expected is None:
        with pytest.raises(Exception, match="lies in no folder"):
            sibling_url(url, root)
    else:
        assert sibling_url(url, root) == expected


@pytest.mark.parametrize("root", ["../x", "/x", "a//b", "", ".hidden", "a/../b"])
def test_no_sibling_lies_outside(root: str) -> None:
    # rule N2, rule K1
    with pytest.raises(Exception, match="rule K1"):
        sibling_url("file:///tmp/a/run", root)


def test_names_of_forks_are_keys() -> None:
    from torch_delta.format.keys import validate_key

    for url in ("file:///tmp/My%20Run", "s3://b/RUN_7", "memory://x", "file:///tmp/..", f"s3://b/{'x' * 300}"):
        validate_key(fork_root(url))
    assert fork_root("s3://b/run-7-3fa94c21")[:6] == "run-7-"
    assert len(fork_root("s3://b/run-7-3fa94c21")) == len("run-7-3fa94c21")


def test_a_circle_of_successors_is_no_endless_walk(tmp_path, base) -> None:
    from torch_delta.format.head import Successor

    train(tmp_path / "a", base, [])
    train(tmp_path / "b", base, [])
    a, b = (Stream(LocalStore(tmp_path / name)) for name in "ab")
    for one, other, name in ((a, b, "b"), (b, a, "a")):
        one.write_successor(
            Successor(
                stream_id=one.load()[0].stream_id,
                version=0,
                commit_sha256=one.info_sha256,
                root=name,
                successor_id=other.load()[0].stream_id,
            )
        )
    with pytest.raises(Exception, match="circle"):
        list(walk(Stream(open_store(tmp_path / "a"))))


CHANGE_OVER = """
import sys
from torch_delta.receive import pull
pull(sys.argv[1], sys.argv[2])
"""


@pytest.mark.parametrize(
    "crash",
    [
        "receive.weights_synced:1",
        "receive.patches_dropped:1",
        "receive.parts_fetched:2",
        "receive.next_written:2",
        "receive.state_switched:1",
    ],
)
def test_a_receiver_killed_while_it_goes_over_ends_in_the_new_lineage(tmp_path, base, crash: str) -> None:
    # rules N5, R7, R8
    train(tmp_path / "run", base, [1, 2])
    place = tmp_path / "place"
    with Follower(str(tmp_path / "run")) as follower:
        list(follower.apply_to(LocalCheckpoint(place, base=base), until=0))
    train(tmp_path / "run", base, [7, 8], state=edited([1]))
    run = subprocess.run(
        [sys.executable, "-c", CHANGE_OVER, str(tmp_path / "run"), str(place)],
        env={**os.environ, crashpoints.ENVIRONMENT: f"{crash}:kill"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == -9, run.stderr
    old, new = (reader.sealed(path / "stream.json")["stream_id"] for path in lineages(tmp_path / "run"))
    expected = {(old, 0): [], (old, 1): [1], (new, 0): [1], (new, 1): [1, 7], (new, 2): [1, 7, 8]}
    checkpoint = LocalCheckpoint(place)
    with checkpoint.reading() as folder:
        assert same(reader.folder(folder, _table()), edited(expected[checkpoint.stream_id, checkpoint.version]))
    with Follower(str(tmp_path / "run")) as follower:
        list(follower.apply_to(checkpoint, until="head", timeout_s=20))
    assert (checkpoint.stream_id, checkpoint.version) == (new, 2)
    with checkpoint.reading() as folder:
        assert same(reader.folder(folder, _table()), edited([1, 7, 8]))
