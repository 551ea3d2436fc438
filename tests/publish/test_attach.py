"""Attaching: a base that is proved by digest, a stream that is continued only from where it stands, clear refusals."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from tests.publish import reader
from tests.publish.sources import SCHEMA, ArraySource, edit, edited, initial, rows, same, write_checkpoint
from tests.publish.support import config, open_rank, run_threads
from torch_delta.errors import (
    BaseMismatch,
    CaptureError,
    FormatError,
    StoreUnavailable,
    TorchDeltaError,
    UnsupportedFormat,
)
from torch_delta.format.schema import Schema, TensorSpec
from torch_delta.publish import attach_source
from torch_delta.publish.attaching import _prepare
from torch_delta.publish.base import open_base


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("world", [1, 3])
def test_a_base_is_proved_by_digest(tmp_path, files, world):
    # F56: both sides start from the same bytes
    write_checkpoint(tmp_path / "base", initial(), files=files)

    def rank_main(rank, team):
        open_rank(rank, team, tmp_path / "s", base=open_base(tmp_path / "base")).close()

    run_threads(world, rank_main)
    base = reader.sealed(tmp_path / "s" / "stream.json")["base"]
    assert (base["kind"], base["name"], base["revision"]) == ("local", "base", None)


def test_a_model_that_is_not_its_base_is_refused_by_name(tmp_path):
    # F14: one flipped bit in the base
    state = initial()
    state["b.bias"][3] ^= 1
    base = write_checkpoint(tmp_path / "base", state)
    with pytest.raises(BaseMismatch, match=r"1 of 4 tensors of the model differ from the base base: b\.bias") as caught:
        attach_source(ArraySource(), tmp_path / "s", base=base, config=config())
    assert caught.value.tensors == ["b.bias"]
    assert not (tmp_path / "s").exists()


def test_all_ranks_raise_when_one_ranks_shard_differs(tmp_path):
    base = write_checkpoint(tmp_path / "base", initial())

    def rank_main(rank, team):
        source = ArraySource(owned=rows(rank, 2))
        if rank == 1:
            source._seen["c.scale"][...] ^= 1
        with pytest.raises(BaseMismatch) as caught:
            open_rank(rank, team, tmp_path / "s", base=open_base(base), source=source)
        return caught.value.tensors

    assert run_threads(2, rank_main) == [["c.scale"], ["c.scale"]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.pop("b.bias"), r"b\.bias: not in the base"),
        (lambda state: state.update({"a.weight": state["a.weight"][:9]}), r"BF16 \[9, 6\] in the base, BF16 \[10, 6\]"),
    ],
)
def test_other_tensors_than_the_base_are_refused(tmp_path, change, said):
    # F11, F59: names, dtypes and shapes before any value
    state = initial()
    change(state)
    base = write_checkpoint(tmp_path / "base", state)
    with pytest.raises(BaseMismatch, match=said):
        attach_source(ArraySource(), tmp_path / "s", base=base, config=config())


def test_a_tensor_only_in_the_base_is_refused(tmp_path):
    base = write_checkpoint(tmp_path / "base", initial())
    kept = Schema(tuple(spec for spec in SCHEMA.tensors if spec.name != "c.scale"))
    source = ArraySource(owned=rows(0, 1)[:2], schema=kept)
    with pytest.raises(BaseMismatch, match=r"c\.scale: only in the base"):
        attach_source(source, tmp_path / "s", base=base, config=config())
    assert source.calls[-1] == ("close", 0)


@pytest.mark.parametrize(
    "settings",
    [
        {"quantization_config": {"quant_method": "fp8"}},
        {"text_config": {"quantization_config": {"quant_method": "gptq"}}},
    ],
)
def test_quantised_bases_are_refused(tmp_path, settings):
    base = write_checkpoint(tmp_path / "base", initial(), config=settings)
    with pytest.raises(CaptureError, match="is quantised"):
        attach_source(ArraySource(), tmp_path / "s", base=base, config=config())


def test_a_base_that_is_nowhere(tmp_path, monkeypatch):
    with pytest.raises(StoreUnavailable, match="no such folder; expected a checkpoint folder"):
        attach_source(ArraySource(), tmp_path / "s", base=tmp_path / "missing", config=config())
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(StoreUnavailable, match="neither a folder here nor available from the Hub"):
        attach_source(ArraySource(), tmp_path / "s", base="nobody/nothing", config=config())


def test_a_hub_id_is_found_in_the_cache_when_offline(tmp_path, monkeypatch):
    import huggingface_hub.constants

    commit = "0" * 39 + "1"
    repo = tmp_path / "cache" / "models--some--model"
    write_checkpoint(repo / "snapshots" / commit, initial())
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    attach_source(ArraySource(), tmp_path / "s", base="some/model", config=config()).close()
    base = reader.sealed(tmp_path / "s" / "stream.json")["base"]
    assert (base["kind"], base["name"], base["revision"]) == ("hf", "some/model", commit)


@pytest.mark.parametrize(
    ("damage", "error", "said"),
    [
        (lambda path: (path / "model.safetensors").unlink(), FormatError, r"holds no \*\.safetensors file"),
        (lambda path: (path / "model.safetensors").write_bytes(b"\xff" * 20), FormatError, "damaged safetensors file"),
        (lambda path: (path / "config.json").write_text("{"), FormatError, "not JSON"),
        (
            lambda path: (
                (path / "model.safetensors").rename(path / "x.bin")
                and (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
            ),
            FormatError,
            "names 'gone.safetensors', which is not in the folder",
        ),
        (
            lambda path: (
                (path / "model.safetensors").rename(path / "one.safetensors")
                and (path / "model.safetensors.index.json").write_text("[]")
            ),
            FormatError,
            'not an index with a "weight_map"',
        ),
        (
            lambda path: (
                (path / "model.safetensors").rename(path / "one.safetensors")
                and (path / "two.safetensors").write_bytes((path / "one.safetensors").read_bytes())
            ),
            FormatError,
            r"tensor '\S+' is in one.safetensors and in two.safetensors",
        ),
    ],
)
def test_a_damaged_base_is_named(tmp_path, damage, error, said):
    base = write_checkpoint(tmp_path / "base", initial())
    damage(base)
    with pytest.raises(error, match=said):
        attach_source(ArraySource(), tmp_path / "s", base=base, config=config())


@pytest.mark.parametrize("with_base", [True, False])
def test_a_stream_is_continued_from_its_head(tmp_path, with_base):
    # rule W1
    base = write_checkpoint(tmp_path / "base", initial()) if with_base else None
    source = ArraySource()
    with attach_source(source, tmp_path / "s", base=base, config=config()) as publisher:
        for seed in (1, 2):
            edit(source, seed)
            publisher.publish()
    again = ArraySource(state=edited([1, 2]))
    with attach_source(again, tmp_path / "s", base=base, config=config()) as publisher:
        assert publisher.version == 2
        edit(again, 3)
        assert publisher.publish() == 3
    states = reader.replay(tmp_path / "s", initial())
    assert same(states[3], edited([1, 2, 3]))


def test_a_stream_is_continued_on_another_mesh(tmp_path):
    # rule W1: the digests of any shards add up to the same state
    write_checkpoint(tmp_path / "base", initial())

    def rank_main(rank, team, seed=0):
        source = ArraySource(state=edited(range(1, seed)), owned=rows(rank, team.world_size))
        with open_rank(rank, team, tmp_path / "s", base=open_base(tmp_path / "base"), source=source) as publisher:
            edit(source, seed)
            assert publisher.publish() == seed

    run_threads(3, lambda rank, team: rank_main(rank, team, 1))
    run_threads(2, lambda rank, team: rank_main(rank, team, 2))
    assert same(reader.replay(tmp_path / "s", initial())[2], edited([1, 2]))


def test_other_weights_than_the_head_are_refused_and_say_how_to_go_on(tmp_path):
    # rule W1
    base = write_checkpoint(tmp_path / "base", initial())
    source = ArraySource()
    with attach_source(source, tmp_path / "s", base=base, config=config()) as publisher:
        edit(source, 1)
        publisher.publish()
    with pytest.raises(BaseMismatch, match=r"stands at version 1 with other weights .* publish to a new URL") as caught:
        attach_source(ArraySource(), tmp_path / "s", base=base, config=config(on_restart="refuse"))
    assert caught.value.version == 1


def test_a_new_stream_at_version_0_with_other_weights_names_the_tensors(tmp_path):
    attach_source(ArraySource(), tmp_path, config=config()).close()
    state = initial()
    state["c.scale"] ^= 1
    with pytest.raises(BaseMismatch, match=r"in 1 tensors \(c\.scale\)"):
        attach_source(ArraySource(state=state), tmp_path, config=config(on_restart="refuse"))


def test_a_stream_of_other_tensors_is_refused(tmp_path):
    attach_source(ArraySource(), tmp_path, config=config()).close()
    other = Schema((*SCHEMA.tensors[:3], TensorSpec("d.none", "BF16", (0, 5))))
    source = ArraySource(schema=other)
    with pytest.raises(BaseMismatch, match="holds a stream of other tensors"):
        attach_source(source, tmp_path, config=config())


@pytest.mark.parametrize(
    "future", [{"format_version": [2, 0]}, {"required_features": ["teleport"]}], ids=["format", "feature"]
)
def test_a_stream_of_the_future_is_not_continued(tmp_path, future):
    # rule R1: a writer that does not know all of a stream's rules would break them
    attach_source(ArraySource(), tmp_path, config=config()).close()
    path = tmp_path / "stream.json"
    stored = path.read_bytes()
    line = json.dumps(json.loads(stored.split(b"\n")[0]) | future).encode()
    path.write_bytes(line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n")

    def rank_main(rank, team):
        with pytest.raises(UnsupportedFormat, match=r"2\.0|teleport"):
            open_rank(rank, team, tmp_path)

    run_threads(2, rank_main)
    assert reader.versions(tmp_path) == []
    path.write_bytes(stored)
    attach_source(ArraySource(), tmp_path, config=config()).close()


def test_a_folder_with_something_else_in_it_is_refused(tmp_path):
    (tmp_path / "stream.json").write_text(json.dumps({"format": "somebody else's"}))
    with pytest.raises(FormatError):
        attach_source(ArraySource(), tmp_path, config=config())


def test_a_read_only_directory_is_an_error_at_attach():
    # A file mode would not stop root, who runs the tests in CI; nobody makes folders in /sys.
    with pytest.raises(StoreUnavailable, match="/sys/torch_delta-stream"):
        attach_source(ArraySource(), "/sys/torch_delta-stream", config=config())


def test_a_root_that_is_a_file_is_an_error_at_attach(tmp_path):
    (tmp_path / "s").write_text("in the way")
    with pytest.raises(StoreUnavailable):
        attach_source(ArraySource(), tmp_path / "s", config=config())


def test_an_unknown_url_closes_the_source(tmp_path):
    source = ArraySource()
    with pytest.raises(TorchDeltaError, match="ftp"):
        attach_source(source, "ftp://x/y", config=config())
    assert source.calls == [("close", 0)]


def test_tensors_in_no_model_need_a_base(tmp_path):
    source = ArraySource(owned=rows(0, 1)[:2])
    source.constant = (SCHEMA.index("c.scale"),)
    with pytest.raises(CaptureError, match="1 tensors are in no model"):
        attach_source(source, tmp_path, config=config())


def test_ranks_that_publish_different_tensors_are_refused(tmp_path):
    def rank_main(rank, team):
        other = Schema((*SCHEMA.tensors[:3], TensorSpec("d.none", "BF16", (0, 5))))
        source = ArraySource(owned=rows(rank, 2), schema=other if rank else SCHEMA)
        with pytest.raises(CaptureError, match="ranks 0 and 1 publish different tensors"):
            open_rank(rank, team, tmp_path, source=source)

    run_threads(2, rank_main)


def test_hosts_with_different_bases_are_refused(tmp_path):
    # F56: a folder of the same name on every host, and not the same checkpoint in it
    state = initial()
    state["b.bias"] = state["b.bias"][:3]
    bases = [write_checkpoint(tmp_path / "a" / "base", initial()), write_checkpoint(tmp_path / "b" / "base", state)]

    def rank_main(rank, team):
        with pytest.raises(BaseMismatch, match=r"ranks 0 and 1 see different tensors in the base .*base"):
            _prepare(team, tmp_path / "s", bases[rank], config())

    run_threads(2, rank_main)


def test_base_bits_are_those_in_the_file(tmp_path):
    state = initial()
    base = open_base(write_checkpoint(tmp_path / "base", state, files=2))
    found = {name: bits.copy() for name, bits in base.bits(state)}
    for name, bits in state.items():
        assert np.array_equal(found[name], bits.reshape(-1)), name
        assert found[name].dtype == bits.dtype
