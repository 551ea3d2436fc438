"""Everything that can be wrong with a stream, a base or a disk: its own error, and the checkpoint stays whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pytest

from tests.receive.handmade import Slice, Trainer, read_folder, sealed, small_trainer
from torch_delta.errors import (
    BaseMismatch,
    ChainError,
    DigestMismatch,
    FormatError,
    StoreUnavailable,
    TorchDeltaError,
    UnsupportedFormat,
)
from torch_delta.receive import Follower, LocalCheckpoint, pull

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def checkpoint(trainer: Trainer, base: Path, place: Path, rng: np.random.Generator) -> LocalCheckpoint:
    """At version 1 of a stream at version 1."""
    trainer.step(rng)
    return pull(str(trainer.root), place, base=base)


def refused(trainer: Trainer, checkpoint: LocalCheckpoint, error: type[TorchDeltaError], match: str) -> TorchDeltaError:
    """Following raises, and the checkpoint is at its old version with the right bits and nothing left over."""
    version = checkpoint.version
    with pytest.raises(error, match=match) as caught:
        pull(str(trainer.root), checkpoint.path, timeout_s=10)
    assert type(caught.value) is error
    assert checkpoint.version == version
    trainer.assert_at(checkpoint.path, version)
    LocalCheckpoint(checkpoint.path).verify()
    hidden = checkpoint.path / ".torch_delta"
    assert [p.name for p in (hidden / "tmp").iterdir()] == []
    assert not [p for p in hidden.iterdir() if p.name.startswith(("stage", "next", "install"))]
    return caught.value


def heals(trainer: Trainer, checkpoint: LocalCheckpoint) -> None:
    """A later anchor leads around the trouble."""
    trainer.anchor()
    reports: list = []
    pull(str(trainer.root), checkpoint.path, on_report=reports.append)
    assert reports[0].kind == "anchor"
    trainer.assert_at(checkpoint.path, trainer.version)


def parts_of(trainer: Trainer, version: int) -> list[Path]:
    return sorted((trainer.root / f"parts/{version:020d}").iterdir())


# -- objects of the stream ------------------------------------------------------------------------


def test_a_flipped_bit_anywhere_in_a_part(
    trainer: Trainer, checkpoint: LocalCheckpoint, rng: np.random.Generator
) -> None:
    # rule R5
    trainer.step(rng)
    path = parts_of(trainer, 2)[0]
    data = bytearray(path.read_bytes())
    data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    path.write_bytes(data)
    error = refused(trainer, checkpoint, FormatError, "sha256")
    assert error.rule == "R5"
    assert path.name in error.key
    heals(trainer, checkpoint)


def test_a_part_cut_off(trainer: Trainer, checkpoint: LocalCheckpoint, rng: np.random.Generator) -> None:
    # rule R5
    trainer.step(rng)
    path = parts_of(trainer, 2)[-1]
    path.write_bytes(path.read_bytes()[:-1])
    refused(trainer, checkpoint, FormatError, "manifest says")
    heals(trainer, checkpoint)


def test_a_missing_part_without_a_way_around(
    trainer: Trainer, checkpoint: LocalCheckpoint, rng: np.random.Generator
) -> None:
    # rule R5
    trainer.step(rng)
    parts_of(trainer, 2)[0].unlink()
    error = refused(trainer, checkpoint, ChainError, "version 2 cannot be read.*no later anchor")
    assert error.missing == 2
    heals(trainer, checkpoint)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_commit(trainer: Trainer, checkpoint: LocalCheckpoint, rng: np.random.Generator, damage: str) -> None:
    # rule R4
    trainer.step(rng)
    path = trainer.root / f"commits/{2:020d}.json"
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes({"flip": bytes(data), "cut": bytes(data[:-10]), "empty": b""}[damage])
    refused(trainer, checkpoint, FormatError, "seal")
    # nothing vouches for the commit that an anchor of version 2 would copy, but one of version 3 stands for itself
    trainer.step(rng)
    heals(trainer, checkpoint)


@pytest.mark.parametrize(
    ("overrides", "error", "match"),
    [
        ({"format_version": [2, 0]}, UnsupportedFormat, "2.0"),
        ({"required_features": ["teleport"]}, UnsupportedFormat, "teleport"),
        ({"stream_id": "ab" * 16}, FormatError, "two streams"),
        ({"schema": "ab" * 32}, FormatError, "schema"),
        ({"parent_sha256": "ab" * 32}, ChainError, "another history"),
        ({"state_sha256": "ab" * 32}, DigestMismatch, "C5"),
        ({"version": 3}, FormatError, "version 3"),
    ],
)
def test_a_commit_that_says_something_else(
    trainer: Trainer,
    checkpoint: LocalCheckpoint,
    overrides: dict,
    error: type[TorchDeltaError],
    match: str,
) -> None:
    # rules R1, R4, R9, C2, C5
    trainer.publish([[Slice("layer.bias", (0,), trainer.bits["layer.bias"] ^ 1, "coo")]], **overrides)
    refused(trainer, checkpoint, error, match)


@pytest.mark.parametrize("key", ["../../etc/passwd", "/etc/passwd", "parts/\0", "parts/../stream.json", "anchors/x"])
def test_a_hostile_key_in_a_commit(trainer: Trainer, checkpoint: LocalCheckpoint, key: str) -> None:
    part = trainer.part(2, 0, [Slice("layer.bias", (0,), trainer.bits["layer.bias"] ^ 1)])
    trainer.commit([{**part, "key": key}])
    refused(trainer, checkpoint, FormatError, "key")


def test_overlapping_slices_of_two_ranks(trainer: Trainer, checkpoint: LocalCheckpoint) -> None:
    # rules P1, R6
    weight = trainer.bits["layer.weight"]
    one = trainer.part(2, 0, [Slice("layer.weight", (0, 0), weight[:10] ^ 1)])
    two = trainer.part(2, 1, [Slice("layer.weight", (9, 0), weight[9:12] ^ 1)])
    trainer.commit([one, two])
    assert refused(trainer, checkpoint, FormatError, "overlap").rule == "P1"


def test_a_part_of_another_version_or_rank(trainer: Trainer, checkpoint: LocalCheckpoint) -> None:
    # rule P13
    told = {"version": 7}
    trainer.commit([trainer.part(2, 0, [Slice("layer.bias", (0,), trainer.bits["layer.bias"] ^ 1)], metadata=told)])
    assert refused(trainer, checkpoint, FormatError, "P13").rule == "P13"


def test_a_relative_frame_in_an_absolute_stream(tmp_path: Path, place: Path) -> None:
    # rule I5
    trainer = small_trainer(tmp_path / "stream", absolute_only=True).start()
    checkpoint = LocalCheckpoint(place, base=trainer.checkpoint(tmp_path / "base"))
    trainer.publish([[Slice("layer.bias", (0,), trainer.bits["layer.bias"] ^ 1, "coo")]])
    pull(str(trainer.root), place)
    trainer.publish([[Slice("layer.bias", (0,), trainer.bits["layer.bias"] ^ 1, "xor")]])
    assert refused(trainer, checkpoint, FormatError, "I5").rule == "I5"


def test_a_payload_that_does_not_give_its_increment(trainer: Trainer, checkpoint: LocalCheckpoint) -> None:
    # rules E5, R6: the writer declared another increment than its own bits have
    old = trainer.bits["layer.bias"].copy()
    part = trainer.part(2, 0, [Slice("layer.bias", (0,), old ^ 1, "coo")])
    path = trainer.root / part["key"]
    data = path.read_bytes().replace((old ^ 1).tobytes(), (old ^ 2).tobytes())
    assert data != path.read_bytes()
    path.write_bytes(data)
    import hashlib

    trainer.bits["layer.bias"] = old ^ 1
    trainer.commit([{**part, "sha256": hashlib.sha256(data).hexdigest()}])
    refused(trainer, checkpoint, DigestMismatch, "layer.bias")


@pytest.mark.parametrize("key", ["stream.json", "schema"])
def test_damaged_identity(trainer: Trainer, base: Path, place: Path, key: str) -> None:
    checkpoint = LocalCheckpoint(place, base=base)
    path = next(trainer.root.glob("schema/*")) if key == "schema" else trainer.root / key
    path.write_bytes(path.read_bytes().replace(b"BF16", b"BF17").replace(b"handmade", b"handmadf"))
    with pytest.raises(FormatError, match="damaged"):
        pull(str(trainer.root), place)
    assert checkpoint.version is None


def test_a_stream_of_the_future(trainer: Trainer, base: Path, place: Path) -> None:
    # rule R1
    stored = (trainer.root / "stream.json").read_bytes().split(b"\n")[0]
    import json

    trainer.put("stream.json", sealed({**json.loads(stored), "format_version": [2, 0]}))
    with pytest.raises(UnsupportedFormat, match=r"2\.0"):
        pull(str(trainer.root), place, base=base)


def test_a_damaged_hint_costs_nothing(trainer: Trainer, checkpoint: LocalCheckpoint, rng: np.random.Generator) -> None:
    # rule R2
    trainer.step(rng)
    trainer.put("head.json", b"nonsense")
    assert pull(str(trainer.root), checkpoint.path).version == 2


# -- bases ------------------------------------------------------------------------


def test_another_base_is_refused_by_name_and_left_usable(
    trainer: Trainer, base: Path, place: Path, rng: np.random.Generator
) -> None:
    trainer.step(rng)
    weights = base / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 0x80
    weights.write_bytes(data)
    with pytest.raises(BaseMismatch, match="1 of 7 tensors") as caught:
        pull(str(trainer.root), place, base=base)
    assert len(caught.value.tensors) == 1
    assert LocalCheckpoint(place).version is None
    # it says how to go on: no base, in an empty folder, from an anchor
    trainer.anchor()
    pull(str(trainer.root), place.with_name("fresh"))
    trainer.assert_at(place.with_name("fresh"), 1)


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda t: t.dtypes.update({"layer.weight": "F16"}), "layer.weight: expected BF16"),
        (lambda t: t.history[0].update({"layer.bias": t.bits["layer.bias"].reshape(3, 11)}), r"got F32 \[3, 11\]"),
        (lambda t: t.names.remove("layer.weight"), "layer.weight: missing"),
        (lambda t: (t.ties.pop("lm_head.weight"), t.dtypes.update(new="U8"), t.names.append("new"),
                    t.history[0].update(new=np.zeros(3, "u1"))), "new: the stream has no such tensor"),
    ],
    ids=["dtype", "shape", "missing", "unknown"],
)  # fmt: skip
def test_a_base_with_other_tensors(
    trainer: Trainer,
    tmp_path: Path,
    place: Path,
    edit: Callable[[Trainer], object],
    match: str,
    rng: np.random.Generator,
) -> None:
    # F11
    trainer.step(rng)
    other = small_trainer(tmp_path / "unused")
    edit(other)
    if "lm_head.weight" not in other.ties:
        other.names.remove("lm_head.weight")
    base = other.checkpoint(tmp_path / "other", 0)
    with pytest.raises(BaseMismatch, match=match) as caught:
        pull(str(trainer.root), place, base=base)
    assert len(caught.value.tensors) == 1


def test_an_extra_tensor_can_be_allowed(
    trainer: Trainer, tmp_path: Path, place: Path, rng: np.random.Generator
) -> None:
    other = small_trainer(tmp_path / "unused")
    other.names.append("position_ids")
    other.dtypes["position_ids"] = "I64"
    other.history[0]["position_ids"] = np.arange(5, dtype="<u8")
    base = other.checkpoint(tmp_path / "other", 0)
    trainer.step(rng)
    checkpoint = LocalCheckpoint(place, base=base, allow_extra=["position_ids"])
    with Follower(str(trainer.root)) as follower:
        list(follower.apply_to(checkpoint, until="head"))
    trainer.assert_at(place, 1)
    assert read_folder(place)["position_ids"].tolist() == [0, 1, 2, 3, 4]


def test_a_tie_stored_twice_that_disagrees(trainer: Trainer, tmp_path: Path, place: Path) -> None:
    base = trainer.checkpoint(tmp_path / "base", 0, with_ties=True)
    weights = base / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1  # the tie is written last
    weights.write_bytes(data)
    with pytest.raises(TorchDeltaError, match="tied"):
        pull(str(trainer.root), place, version=0, base=base)


def test_a_checkpoint_of_another_stream(trainer: Trainer, checkpoint: LocalCheckpoint, tmp_path: Path) -> None:
    other = small_trainer(tmp_path / "other").start()
    with pytest.raises(BaseMismatch, match="Use another folder") as caught:
        pull(str(other.root), checkpoint.path, timeout_s=5)
    assert (caught.value.expected, caught.value.got) == (trainer.stream_id, other.stream_id)
    trainer.assert_at(checkpoint.path, 1)


def test_a_folder_with_something_else_in_it(trainer: Trainer, base: Path, place: Path) -> None:
    place.mkdir()
    (place / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreUnavailable, match=r"not empty \(thesis.tex\)"):
        LocalCheckpoint(place, base=base)
    assert (place / "thesis.tex").read_text() == "years of work"


def test_no_base_no_anchor(trainer: Trainer, place: Path, rng: np.random.Generator) -> None:
    trainer.step(rng)
    with pytest.raises(ChainError, match="starts from local 'handmade': open the checkpoint with base="):
        pull(str(trainer.root), place)


def test_a_base_that_is_nowhere(place: Path, monkeypatch: pytest.MonkeyPatch, base: Path, trainer: Trainer) -> None:
    import huggingface_hub.constants

    with pytest.raises(StoreUnavailable, match="no such folder"):
        LocalCheckpoint(place, base="/no/such/folder")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(place.with_name("cache")))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(StoreUnavailable, match="'nobody/nothing' is no folder here, and could not be had from the Hub"):
        LocalCheckpoint(place, base="nobody/nothing")
    LocalCheckpoint(place, base=base)
    trainer.assert_at(place, 0)


# -- this host ------------------------------------------------------------------------


def full_disk(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """The named call of `os` fails as on a full disk, once; returns what it was asked."""
    real = getattr(os, name)
    fired: list[str] = []

    def refuse(*args: object, **named: object) -> object:
        if not fired:
            fired.append(name)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **named)

    monkeypatch.setattr(os, name, refuse)
    return fired


@pytest.mark.parametrize("name", ["posix_fallocate", "pwritev", "fsync"])
def test_a_full_disk_while_applying(
    trainer: Trainer, checkpoint: LocalCheckpoint, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    trainer.step(rng)
    with Follower(str(trainer.root)) as follower:
        with monkeypatch.context() as patch:
            fired = full_disk(patch, name)
            with pytest.raises(StoreUnavailable, match="the disk is full: free some space") as caught:
                list(follower.apply_to(checkpoint, until="head"))
        assert fired == [name]
        assert caught.value.errno == errno.ENOSPC
        assert checkpoint.version == 1
        trainer.assert_at(checkpoint.path, 1)
        list(follower.apply_to(checkpoint, until="head"))
    trainer.assert_at(checkpoint.path, 2)


def test_writes_that_are_cut_short_go_on_where_they_stopped(
    trainer: Trainer, checkpoint: LocalCheckpoint, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    short: list[int] = []

    def pwritev(fd: int, views: list[memoryview], at: int) -> int:
        joined = b"".join(views)
        short.append(min(len(joined), 5 + len(joined) // 2))
        return os.pwrite(fd, joined[: short[-1]], at)

    trainer.step(rng)
    with Follower(str(trainer.root)) as follower:
        monkeypatch.setattr(os, "pwritev", pwritev)
        list(follower.apply_to(checkpoint, until="head"))
    assert len(short) > 10
    trainer.assert_at(checkpoint.path, 2)


def test_a_full_disk_while_copying_the_base(
    base: Path, place: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fired = full_disk(patch, "write")
        with pytest.raises(StoreUnavailable, match="the disk is full"):
            LocalCheckpoint(place, base=base)
    assert fired
    assert [path.name for path in place.iterdir()] == [".torch_delta"]
    LocalCheckpoint(place, base=base)
    trainer.assert_at(place, 0)


def test_a_full_disk_while_loading_an_anchor(
    trainer: Trainer, checkpoint: LocalCheckpoint, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.step(rng)
    trainer.anchor()
    trainer.forget(1, 2)
    with monkeypatch.context() as patch:
        fired = full_disk(patch, "fsync")
        with pytest.raises(StoreUnavailable, match="the disk is full"):
            pull(str(trainer.root), checkpoint.path, version=2)
    assert fired
    trainer.assert_at(checkpoint.path, 1)
    pull(str(trainer.root), checkpoint.path, version=2)
    trainer.assert_at(checkpoint.path, 2)


def test_cloned_weights_need_room_before_they_are_written(
    trainer: Trainer, checkpoint: LocalCheckpoint, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A mapped write to a cloned file that finds no free block kills the process, so room is checked first.
    import dataclasses

    with checkpoint.writing() as session:
        session._put_state(dataclasses.replace(session.state, shared_extents=True))
    trainer.step(rng)

    class NoRoom:
        f_bavail, f_frsize = 1, 512

    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda _: NoRoom)
        with pytest.raises(StoreUnavailable, match="512 bytes free"):
            pull(str(trainer.root), checkpoint.path)
    trainer.assert_at(checkpoint.path, 1)
    pull(str(trainer.root), checkpoint.path)
    trainer.assert_at(checkpoint.path, 2)


def test_a_read_only_folder(trainer: Trainer, base: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        with pytest.raises(StoreUnavailable, match="this user may not write there"):
            LocalCheckpoint(place, base=base)
    LocalCheckpoint(place, base=base)
    trainer.assert_at(place, 0)


# -- bytes at rest ------------------------------------------------------------------------


def rot(checkpoint: LocalCheckpoint, name: str) -> None:
    """Change a byte of a tensor behind everybody's back."""
    path = checkpoint.path / "model.safetensors"
    data = bytearray(path.read_bytes())
    needle = read_folder(checkpoint.path)[name].tobytes()
    at = bytes(data).index(needle)
    with path.open("r+b") as stream:
        stream.seek(at)
        stream.write(bytes([data[at] ^ 1]))


def test_a_record_of_another_release(checkpoint: LocalCheckpoint) -> None:
    import json

    path = checkpoint.path / ".torch_delta" / "state.json"
    fields = json.loads(path.read_bytes().split(b"\n")[0])
    for change, match in (
        ({"format_version": 99}, r"written by another release \(state format 99, .*start in an empty folder"),
        ({"version": "1"}, "version is '1', expected int"),
    ):
        path.write_bytes(sealed({**fields, **change}))
        with pytest.raises(FormatError, match=match):
            LocalCheckpoint(checkpoint.path).verify()
    path.write_bytes(sealed(fields))
    assert LocalCheckpoint(checkpoint.path).verify().version == 1


def test_a_checkpoint_that_follows_nothing_yet(base: Path, place: Path, trainer: Trainer) -> None:
    checkpoint = LocalCheckpoint(place, base=base)
    with pytest.raises(ChainError, match="follows no stream yet; apply one with a Follower first"):
        _ = checkpoint.schema
    trainer.assert_at(place, 0)


@pytest.mark.parametrize("name", ["state.json", "schema.json"])
def test_a_damaged_record_of_the_checkpoint_itself(trainer: Trainer, checkpoint: LocalCheckpoint, name: str) -> None:
    path = checkpoint.path / ".torch_delta" / name
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(FormatError, match="damaged"):
        LocalCheckpoint(checkpoint.path).verify()
    trainer.anchor()
    pull(str(trainer.root), checkpoint.path.with_name("fresh"))
    trainer.assert_at(checkpoint.path.with_name("fresh"), 1)


def test_verify_finds_a_flipped_byte_and_names_its_tensor(checkpoint: LocalCheckpoint) -> None:
    # F14
    assert checkpoint.verify(full=False).num_tensors == 7
    rot(checkpoint, "layer.weight")
    with pytest.raises(DigestMismatch, match=r"layer.weight") as caught:
        checkpoint.verify()
    assert caught.value.tensors == ("layer.weight",)


def test_rot_is_found_at_start_and_healed_from_an_anchor(
    trainer: Trainer, checkpoint: LocalCheckpoint, rng: np.random.Generator
) -> None:
    # F14, rule R9
    trainer.anchor()
    rot(checkpoint, "layer.weight")
    trainer.step(rng)
    reports: list = []
    pull(str(trainer.root), checkpoint.path, on_report=reports.append)
    assert [(report.kind, report.version) for report in reports] == [("anchor", 1), ("delta", 2)]
    assert reports[0].from_version is None
    trainer.assert_at(checkpoint.path, 2)
    told: list[int] = []
    assert checkpoint.verify(on_bytes=told.append).size_bytes == sum(told) > 0


@pytest.mark.parametrize("damage", ["cut off", "gone"])
@pytest.mark.parametrize("verify", ["start", "never"])
def test_a_weight_file_that_is_cut_off_or_gone_is_healed_too(
    trainer: Trainer,
    checkpoint: LocalCheckpoint,
    rng: np.random.Generator,
    damage: str,
    verify: Literal["start", "never"],
) -> None:
    trainer.anchor()
    path = checkpoint.path / "model.safetensors"
    if damage == "cut off":
        os.truncate(path, path.stat().st_size - 5)
    else:
        path.unlink()
    trainer.step(rng)
    with LocalCheckpoint(checkpoint.path) as again, Follower(str(trainer.root), verify=verify) as follower:
        assert [report.kind for report in follower.apply_to(again, until="head", timeout_s=10)] == ["anchor", "delta"]
    trainer.assert_at(checkpoint.path, 2)


@pytest.mark.parametrize("damage", ["rotten", "cut off"])
def test_pulling_what_is_there_already_proves_it_and_heals(
    trainer: Trainer, checkpoint: LocalCheckpoint, damage: str
) -> None:
    # F14: nothing is newer, which is no reason to hand out damaged weights
    trainer.anchor()
    if damage == "rotten":
        rot(checkpoint, "layer.weight")
    else:
        path = checkpoint.path / "model.safetensors"
        os.truncate(path, path.stat().st_size - 5)
    reports: list = []
    pull(str(trainer.root), checkpoint.path, on_report=reports.append)
    assert [(report.kind, report.version) for report in reports] == [("anchor", 1)]
    trainer.assert_at(checkpoint.path, 1)


def test_a_path_that_is_a_file(trainer: Trainer, base: Path, place: Path) -> None:
    place.write_text("something else")
    with pytest.raises(StoreUnavailable, match="a file lies where a folder must be"):
        LocalCheckpoint(place, base=base)


def test_rot_without_an_anchor_is_healed_from_the_base(
    trainer: Trainer, base: Path, checkpoint: LocalCheckpoint, rng: np.random.Generator
) -> None:
    rot(checkpoint, "layer.weight")
    trainer.step(rng)
    pull(str(trainer.root), checkpoint.path, base=base)
    trainer.assert_at(checkpoint.path, 2)


def test_rot_without_a_way_back_is_said_until_there_is_one(
    trainer: Trainer, checkpoint: LocalCheckpoint, rng: np.random.Generator
) -> None:
    # F07: a damaged checkpoint is not handed out
    rot(checkpoint, "layer.weight")
    trainer.step(rng)
    for _ in range(2):
        with pytest.raises(ChainError, match="no path to version 2"):
            pull(str(trainer.root), checkpoint.path)
        with pytest.raises(DigestMismatch, match="cannot be used"), checkpoint.reading():
            pass
        with pytest.raises(DigestMismatch, match="cannot be used"):
            checkpoint.verify()
    trainer.anchor()
    assert pull(str(trainer.root), checkpoint.path).damage == ""
    trainer.assert_at(checkpoint.path, 2)


def test_rot_in_what_a_delta_touches_is_found_in_any_mode(trainer: Trainer, checkpoint: LocalCheckpoint) -> None:
    # rule E5: the increment is computed from our own old bits
    rot(checkpoint, "layer.weight")
    trainer.publish([[Slice("layer.weight", (0, 0), trainer.bits["layer.weight"] ^ 1, "xor")]])
    trainer.anchor()
    with Follower(str(trainer.root), verify="never") as follower:
        (report,) = follower.apply_to(checkpoint, until="head")
    assert report.kind == "anchor"
    trainer.assert_at(checkpoint.path, 2)


def test_verify_every_looks_before_each_version(
    trainer: Trainer, checkpoint: LocalCheckpoint, rng: np.random.Generator
) -> None:
    # F14, strict
    checkpoint = LocalCheckpoint(checkpoint.path)  # without its base to heal from
    with Follower(str(trainer.root), verify="every") as follower:
        trainer.step(rng)
        list(follower.apply_to(checkpoint, until="head"))
        rot(checkpoint, "layer.scale")
        trainer.publish([[Slice("layer.bias", (0,), trainer.bits["layer.bias"] ^ 1)]])
        with pytest.raises(ChainError, match="no path"):
            list(follower.apply_to(checkpoint, until="head"))
    assert "layer.scale" in checkpoint.damage
