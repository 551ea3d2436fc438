"""Following a stream with a local checkpoint, bit for bit, from a stream written by hand."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.receive.handmade import Slice, Trainer, random_bits, read_folder, small_trainer
from torch_delta.errors import ChainError, DeadlineExceeded, FormatError, StoreUnavailable
from torch_delta.receive import Follower, LocalCheckpoint, fetch, pull
from torch_delta.store import open_store
from torch_delta.testing.faults import Fault, FaultyStore, fail_before

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "stream-v1"


def follow(trainer: Trainer, checkpoint: LocalCheckpoint, until: object = "head", **options: object) -> list:
    with Follower(str(trainer.root), poll_interval_s=0.01, **options) as follower:
        return [*follower.apply_to(checkpoint, until=until, timeout_s=30)]


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("with_ties", [False, True])
def test_every_version_is_exact(
    trainer: Trainer, tmp_path: Path, place: Path, rng: np.random.Generator, num_files: int, with_ties: bool
) -> None:
    base = trainer.checkpoint(tmp_path / "base", 0, num_files=num_files, with_ties=with_ties)
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    checkpoint = LocalCheckpoint(place, base=base)
    assert checkpoint.version is None
    for version in range(1, 6):
        trainer.step(rng)
        (report,) = follow(trainer, checkpoint)
        assert (report.version, report.from_version, report.kind) == (version, version - 1, "delta")
        assert report.num_changed == trainer.num_changed[version]
        assert checkpoint.version == version
        trainer.assert_at(place, version)
        assert checkpoint.verify().version == version
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before
    assert read_folder(place).keys() == read_folder(base).keys()


def test_the_golden_stream_is_followed(tmp_path: Path) -> None:
    pull(str(GOLDEN), tmp_path / "two", version=2)
    anchor = GOLDEN / "anchors" / "00000000000000000002-000000000000000a" / "model.safetensors"
    assert read_folder(tmp_path / "two").keys() == read_folder(anchor.parent).keys()
    for name, bits in read_folder(anchor.parent).items():
        np.testing.assert_array_equal(read_folder(tmp_path / "two")[name], bits)
    checkpoint = pull(str(GOLDEN), tmp_path / "two")
    assert checkpoint.version == 3
    checkpoint.verify()


@settings(max_examples=25)
@given(data=st.data())
def test_random_versions_over_random_tensors(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    tmp_path = tmp_path_factory.mktemp("random")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    extents = st.lists(st.integers(1, 9), max_size=3)
    dtypes = data.draw(
        st.dictionaries(
            st.text("abc.", min_size=1, max_size=4),
            st.sampled_from(["BF16", "F32", "I64", "F8_E4M3"]),
            min_size=1,
            max_size=4,
        )
    )
    bits = {name: random_bits(rng, dtype, tuple(data.draw(extents))) for name, dtype in dtypes.items()}
    trainer = Trainer(tmp_path / "stream", dtypes, bits).start()
    checkpoint = LocalCheckpoint(tmp_path / "place", base=trainer.checkpoint(tmp_path / "base"))
    for _ in range(data.draw(st.integers(1, 4))):
        ranks: list[list[Slice]] = [[], []]
        for name, old in trainer.bits.items():
            window = tuple(
                slice(a, data.draw(st.integers(a + 1, n)))
                for n in old.shape
                for a in [data.draw(st.integers(0, n - 1))]
            )
            piece = old[window]
            touched = rng.random(piece.shape) < data.draw(st.sampled_from([0.0, 0.3, 1.0]))
            noise = rng.integers(1, 255, piece.shape, dtype=old.dtype)
            new = np.where(touched, piece ^ noise, piece).astype(old.dtype)
            encoding = data.draw(st.sampled_from(["coo", "xor", "dense"]))
            if encoding == "dense" or not np.array_equal(new, piece):
                offset = tuple(part.start for part in window)
                ranks[data.draw(st.integers(0, 1))].append(Slice(name, offset, new, encoding))
        trainer.publish(ranks)
    assert [report.version for report in follow(trainer, checkpoint, merge_from=None)] == list(
        range(1, trainer.version + 1)
    )
    trainer.assert_at(tmp_path / "place", trainer.version)
    for version in range(1, trainer.version + 1):
        check_patch(trainer, checkpoint, version)
    checkpoint.close()
    shutil.rmtree(tmp_path)


def check_patch(trainer: Trainer, checkpoint: LocalCheckpoint, version: int) -> None:
    """The kept patch of a version, applied with plain numpy to the version before, gives the version."""
    state = {name: bits.copy() for name, bits in trainer.history[version - 1].items()}
    for tensor, slices in checkpoint.patch(version).items():
        full = state[trainer.names[tensor]]
        for box, positions, value in slices:
            window = tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))
            inside = full[window].copy().reshape(-1)
            inside[slice(None) if positions is None else positions] = value
            full[window] = inside.reshape(box.shape)
    for name, bits in state.items():
        np.testing.assert_array_equal(bits, trainer.history[version][name])


def test_a_version_without_changes_is_a_version(trainer: Trainer, base: Path, place: Path) -> None:
    # F02: an empty delta is explicit; the reported version is the verified one.
    trainer.publish([])
    (report,) = follow(trainer, LocalCheckpoint(place, base=base))
    assert (report.version, report.num_changed, report.stored_bytes) == (1, 0, 0)
    trainer.assert_at(place, 1)
    assert len(LocalCheckpoint(place).patch(1)) == 0


def test_special_bits_arrive_as_they_are(trainer: Trainer, base: Path, place: Path) -> None:
    # F27: NaN is a value like any other, and -0.0 is not 0.0.
    new = trainer.bits["embed.weight"].copy()
    new[0, :4] = [0x7FC1, 0xFFC0, 0x8000, 0x7F80]
    trainer.publish([[Slice("embed.weight", (0, 0), new, "coo")]])
    new[0, :4] = [0x7FC2, 0xFFC0, 0x0000, 0xFF80]
    trainer.publish([[Slice("embed.weight", (0, 0), new, "xor")]])
    follow(trainer, LocalCheckpoint(place, base=base))
    assert read_folder(place)["embed.weight"][0, :4].tolist() == [0x7FC2, 0xFFC0, 0x0000, 0xFF80]


def test_pull_stops_at_the_wanted_version_and_never_goes_back(
    trainer: Trainer, base: Path, place: Path, rng: np.random.Generator
) -> None:
    for _ in range(4):
        trainer.step(rng)
    seen: list[int] = []
    checkpoint = pull(
        str(trainer.root), place, version=2, base=base, on_report=lambda report: seen.append(report.version)
    )
    assert (checkpoint.version, seen) == (2, [1, 2])
    trainer.assert_at(place, 2)
    assert pull(str(trainer.root), place).version == 4
    with pytest.raises(ChainError, match="at version 4, beyond 3") as caught:
        pull(str(trainer.root), place, version=3)
    assert caught.value.local_version == 4
    trainer.assert_at(place, 4)


def test_the_folder_itself_can_be_the_base(trainer: Trainer, base: Path, rng: np.random.Generator) -> None:
    trainer.step(rng)
    follow(trainer, LocalCheckpoint(base))
    trainer.assert_at(base, 1)


def test_a_follower_waits_for_the_stream_and_for_versions(
    tmp_path: Path, place: Path, rng: np.random.Generator
) -> None:
    # F96, F103: what is not there yet is waited for, by polling, not looked for once.
    trainer = small_trainer(tmp_path / "stream")
    checkpoint = LocalCheckpoint(place, base=trainer.checkpoint(tmp_path / "base"))
    reports = []
    with Follower(str(trainer.root), poll_interval_s=0.01) as follower:
        thread = threading.Thread(target=lambda: reports.extend(follower.apply_to(checkpoint, until=2, timeout_s=30)))
        thread.start()
        trainer.start()
        trainer.step(rng)
        trainer.step(rng)
        thread.join(timeout=60)
    assert [report.version for report in reports] == [1, 2]
    trainer.assert_at(place, 2)


def test_waiting_ends_at_its_deadline_naming_what_is_missing(
    trainer: Trainer, base: Path, place: Path, tmp_path: Path
) -> None:
    with pytest.raises(DeadlineExceeded, match="wait for the stream to begin") as caught:
        follow_for(tmp_path / "nothing", LocalCheckpoint(place, base=base))
    assert caught.value.peer.endswith("nothing")
    with pytest.raises(DeadlineExceeded, match="wait for version 1"):
        follow_for(trainer.root, LocalCheckpoint(place, base=base))


def follow_for(root: Path, checkpoint: LocalCheckpoint) -> None:
    root.mkdir(exist_ok=True)
    with Follower(str(root), poll_interval_s=0.01) as follower:
        for _ in follower.apply_to(checkpoint, until=1, timeout_s=0.05):
            pass


def test_stop_ends_a_follower_that_waits(trainer: Trainer, base: Path, place: Path, rng: np.random.Generator) -> None:
    trainer.step(rng)
    checkpoint = LocalCheckpoint(place, base=base)
    with Follower(str(trainer.root), poll_interval_s=60, most_poll_interval_s=60) as follower:
        reports = follower.apply_to(checkpoint)
        assert next(reports).version == 1
        timer = threading.Timer(0.05, follower.stop)
        timer.start()
        assert list(reports) == []
        timer.join()


def test_polling_an_idle_stream_costs_one_small_request(
    trainer: Trainer, base: Path, place: Path, rng: np.random.Generator
) -> None:
    # F107, rule R2
    trainer.step(rng)
    checkpoint = LocalCheckpoint(place, base=base)
    store = open_store(str(trainer.root))
    with Follower(store, poll_interval_s=0.001, most_poll_interval_s=0.001) as follower:
        list(follower.apply_to(checkpoint, until="head"))
        asked: list[str] = []
        for name in ("get", "stat", "list", "get_range"):
            original = getattr(store, name)
            setattr(
                store,
                name,
                lambda *a, _name=name, _original=original, **k: (asked.append(_name), _original(*a, **k))[1],
            )
        with pytest.raises(DeadlineExceeded):
            list(follower.apply_to(checkpoint, timeout_s=2))
    assert asked.count("list") == 0
    assert asked.count("stat") > 4
    assert asked.count("get") + asked.count("get_range") <= 2 + asked.count("stat") // 4


def test_large_versions_pass_through_unnamed_files(
    trainer: Trainer, base: Path, place: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_IN_MEMORY_BYTES", 100)
    monkeypatch.setattr(fetch, "_BLOCK_BYTES", 1000)
    checkpoint = LocalCheckpoint(place, base=base)
    for version in (1, 2):
        trainer.step(rng)
        follow(trainer, checkpoint)
        trainer.assert_at(place, version)
    trainer.step(rng)
    part = next(trainer.root.glob(f"parts/{3:020d}/*"))
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    with pytest.raises(FormatError, match="sha256"):  # rule R5
        follow(trainer, checkpoint)
    assert list((place / ".torch_delta" / "tmp").iterdir()) == []
    trainer.assert_at(place, 2)


def test_a_store_that_does_not_answer_is_asked_again(
    trainer: Trainer, base: Path, place: Path, rng: np.random.Generator
) -> None:
    # F78: no answer is not "nothing new"
    checkpoint = LocalCheckpoint(place, base=base)
    trainer.step(rng)
    faults = [
        Fault("stat", "commits/*", effect=fail_before()),
        Fault("get", "head.json", effect=fail_before()),
        Fault("get", "parts/*", effect=fail_before()),
        Fault("get", "commits/*", effect=fail_before()),
    ]
    store = FaultyStore(open_store(str(trainer.root)), faults)
    with Follower(store, poll_interval_s=0.001) as follower:
        assert [report.version for report in follower.apply_to(checkpoint, until="head", timeout_s=30)] == [1]
    store.assert_fired()
    trainer.assert_at(place, 1)


def test_a_store_that_never_answers_is_an_error_in_time(
    trainer: Trainer, base: Path, place: Path, rng: np.random.Generator
) -> None:
    checkpoint = LocalCheckpoint(place, base=base)
    trainer.step(rng)
    always = [Fault("get", "parts/*", nth=nth, effect=fail_before()) for nth in range(1, 200)]
    store = FaultyStore(open_store(str(trainer.root)), always)
    follower = Follower(store, poll_interval_s=0.01, most_poll_interval_s=0.02, retry_s=0.1)
    with follower, pytest.raises(DeadlineExceeded, match="read the stream") as caught:
        list(follower.apply_to(checkpoint, until="head", timeout_s=30))
    assert isinstance(caught.value.__cause__, StoreUnavailable)
    trainer.assert_at(place, 0)


def test_files_and_mappings_do_not_leak(trainer: Trainer, base: Path, place: Path, rng: np.random.Generator) -> None:
    # F93
    checkpoint = LocalCheckpoint(place, base=base)

    def round_trip() -> int:
        trainer.step(rng)
        follow(trainer, checkpoint)
        with checkpoint.reading():
            checkpoint.verify()
        checkpoint.patch(trainer.version)
        return len(list(Path("/proc/self/fd").iterdir()))

    round_trip()
    counts = [round_trip() for _ in range(5)]
    assert counts[-1] <= counts[0]
    checkpoint.close()
    mapped = Path("/proc/self/maps").read_text()
    assert str(place) not in mapped
    assert str(base) not in mapped  # F82: a base may lie on a network file system and is only read


def test_what_patch_hands_out_owns_its_bits(
    trainer: Trainer, base: Path, place: Path, rng: np.random.Generator
) -> None:
    # F25: an array from version 1 is the same after version 2, and after its file is gone.
    checkpoint = LocalCheckpoint(place, base=base)
    trainer.step(rng)
    follow(trainer, checkpoint)
    patch = checkpoint.patch(1)
    copies = {tensor: [item.value.copy() for item in slices] for tensor, slices in patch.items()}
    trainer.step(rng)
    follow(trainer, checkpoint)
    shutil.rmtree(place / ".torch_delta" / "patches")
    for tensor, slices in patch.items():
        for item, copy in zip(slices, copies[tensor], strict=True):
            np.testing.assert_array_equal(item.value, copy)
