"""The one line: a real optimizer and model, published from the optimizer's own step."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from tests.publish import reader
from tests.publish.support import config
from torch_delta import Follower, LocalCheckpoint, attach
from torch_delta.errors import BaseMismatch, PublishFailed, TorchDeltaError
from torch_delta.store.local import LocalStore
from torch_delta.testing.faults import Fault, FaultyStore, fail_before


def small_model(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model, optimizer, seed):
    torch.manual_seed(seed)
    model(torch.randn(5, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def serving_bits(model):
    return {
        name: parameter.detach().to(torch.bfloat16).view(torch.uint16).numpy().copy()
        for name, parameter in model.named_parameters()
    }


def table(root):
    stream = reader.sealed(root / "stream.json")
    return reader.json.loads((root / "schema" / f"{stream['schema']}.json").read_bytes())["tensors"]


def first_state(root):
    (folder,) = [path for path in (root / "anchors").iterdir() if path.is_dir() and path.name.startswith("0" * 20)]
    return reader.folder(folder, table(root))


def equal(left, right):
    return left.keys() == right.keys() and all((left[name] == right[name]).all() for name in left)


@pytest.mark.parametrize("mode", ["transient", "persistent"])
def test_every_optimizer_step_is_a_version(tmp_path, mode):
    model, optimizer = small_model()
    states = [serving_bits(model)]
    with attach(optimizer, model, tmp_path, base=None, mode=mode, config=config()) as publisher:
        for seed in range(4):
            train(model, optimizer, seed)
            states.append(serving_bits(model))
        report = publisher.wait()
    assert (report.version, report.num_steps, report.info["mode"]) == (4, 1, mode)
    published = reader.replay(tmp_path, first_state(tmp_path))
    assert len(published) == len(states)
    for version, state in enumerate(states):
        assert equal(published[version], state)


def test_a_base_folder_and_every_few_steps(tmp_path):
    from safetensors.torch import save_file

    model, optimizer = small_model()
    (tmp_path / "base").mkdir()
    save_file(
        {name: p.detach().to(torch.bfloat16) for name, p in model.named_parameters()},
        tmp_path / "base" / "model.safetensors",
    )
    base = serving_bits(model)
    with attach(
        optimizer, model, tmp_path / "s", base=tmp_path / "base", every=3, config=config(anchor_every=2)
    ) as publisher:
        for seed in range(7):
            train(model, optimizer, seed)
            if seed == 5:
                state = serving_bits(model)
        publisher.wait()
    published = reader.replay(tmp_path / "s", base)
    assert len(published) == 3
    assert equal(published[2], state)
    (manifest,) = (tmp_path / "s" / "anchors").glob("*.json")
    assert reader.sealed(manifest)["version"] == 2


def test_a_refused_attach_leaves_model_optimizer_and_place_as_they_were(tmp_path):
    # F14: the model is not the base it says it is
    from safetensors.torch import save_file

    model, optimizer = small_model()
    (tmp_path / "base").mkdir()
    held = {name: p.detach().to(torch.bfloat16) for name, p in model.named_parameters()}
    save_file({**held, "0.bias": held["0.bias"].flip(0)}, tmp_path / "base" / "model.safetensors")
    with pytest.raises(BaseMismatch, match=r"1 of 4 tensors of the model differ from the base base: 0\.bias") as caught:
        attach(optimizer, model, tmp_path / "s", base=tmp_path / "base", config=config())
    assert caught.value.tensors == ["0.bias"]
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not (tmp_path / "s").exists()
    save_file(held, tmp_path / "base" / "model.safetensors")
    with attach(optimizer, model, tmp_path / "s", base=tmp_path / "base", config=config()) as publisher:
        train(model, optimizer, 0)
        assert publisher.wait().version == 1


def test_a_failed_version_comes_out_of_the_step_and_the_loop_may_go_on(tmp_path):
    model, optimizer = small_model()
    store = FaultyStore(LocalStore(tmp_path), [Fault("put_new", "parts/*", nth=2, effect=fail_before())])
    failed = []
    with attach(optimizer, model, store, base=None, config=config(num_put_attempts=1, max_in_flight=1)) as publisher:
        for seed in range(6):
            try:
                train(model, optimizer, seed)
            except PublishFailed as error:
                failed.append(error.version)
                optimizer.zero_grad()
        publisher.publish()
    store.assert_fired()
    assert failed == [2]
    assert equal(reader.replay(tmp_path, first_state(tmp_path))[-1], serving_bits(model))
    before = len(reader.versions(tmp_path))
    train(model, optimizer, 9)  # detached: the optimizer is as it was
    assert len(reader.versions(tmp_path)) == before


def fill_disk(monkeypatch, folder):
    """Writes below a folder fail while the list that is returned has an entry, which counts them."""
    real, full = os.write, []

    def write(descriptor, data):
        if full and f"/{folder}/" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            full[0] += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    return full


def test_a_full_disk_at_attach_leaves_a_place_that_can_be_attached_to(tmp_path, monkeypatch):
    model, optimizer = small_model()
    full = fill_disk(monkeypatch, "anchors")
    full.append(0)
    with pytest.raises(TorchDeltaError, match="The disk is full: free space"):
        attach(optimizer, model, tmp_path, base=None, config=config(num_put_attempts=2))
    assert full[0] >= 1
    assert not optimizer._optimizer_step_pre_hooks
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    full.clear()
    start = serving_bits(model)
    with attach(optimizer, model, tmp_path, base=None, config=config()) as publisher:
        train(model, optimizer, 0)
        assert publisher.wait().version == 1
    assert equal(reader.replay(tmp_path, start)[-1], serving_bits(model))


def test_a_full_disk_fails_the_version_and_the_next_one_covers_it(tmp_path, monkeypatch):
    model, optimizer = small_model()
    full = fill_disk(monkeypatch, "parts")
    with attach(optimizer, model, tmp_path, base=None, config=config(num_put_attempts=2)) as publisher:
        train(model, optimizer, 0)
        publisher.wait(1)
        full.append(0)
        train(model, optimizer, 1)
        with pytest.raises(PublishFailed, match="The disk is full: free space") as caught:
            publisher.wait()
        assert full[0] >= 2
        assert publisher.version == 1
        assert set(caught.value.failures) == {0}
        full.clear()
        publisher.wait(publisher.publish())
    assert equal(reader.replay(tmp_path, first_state(tmp_path))[-1], serving_bits(model))
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]  # no half-written file stays


class Normalised(torch.nn.Module):
    """Persistent buffers that move in every forward pass, one of them of integers; a layer that is never trained."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 3))
        self.frozen = torch.nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, values):
        self.scratch += 1
        return self.inner(values)


def everything(model, dtypes=torch.bfloat16):
    """Bits of the whole state dict: parameters in their serving dtypes, buffers in their own."""
    kinds = dtypes if isinstance(dtypes, dict) else {name: dtypes for name, _ in model.named_parameters()}
    integers = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
    state = {name: value.to(kinds.get(name, value.dtype)) for name, value in model.state_dict().items()}
    return {name: value.view(integers[value.element_size()]).numpy().copy() for name, value in state.items()}


@pytest.mark.parametrize("mode", ["transient", "persistent"])
def test_buffers_and_weights_loaded_outside_the_optimizer_reach_followers(tmp_path, mode):
    """F03, F23: a version is the model as it is when the version is made, whoever changed it."""
    torch.manual_seed(0)
    model, other = Normalised(), Normalised()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    states = []
    with attach(optimizer, model, tmp_path / "s", base=None, mode=mode, config=config(every=None)) as publisher:
        for version in (1, 2, 3, 4):
            if version == 2:
                model.load_state_dict(other.state_dict())
            if version == 3:  # as weights are swapped for their averages: no sum changes
                model.inner[0].weight.data = model.inner[0].weight.data.flip(0).clone()
            if version != 3:
                train(model, optimizer, version)
            assert publisher.wait(publisher.publish()).version == version
            states.append(everything(model))
        reports = {report.version: report.info.get("out_of_band", "") for report in publisher.reports}
    published = reader.replay(tmp_path / "s", first_state(tmp_path / "s"))
    assert "inner.1.num_batches_tracked" in published[0]
    assert "scratch" not in published[0]
    for version, state in enumerate(states, start=1):
        assert equal(published[version], state), version
    assert [bool(reports[version]) for version in (1, 2, 3, 4)] == [False, *[mode == "transient"] * 2, False]
    checkpoint = LocalCheckpoint(tmp_path / "copy")
    with Follower(str(tmp_path / "s"), merge_from=None) as follower:
        assert [*follower.apply_to(checkpoint, until=4, timeout_s=30)][-1].version == 4
    assert equal(reader.folder(tmp_path / "copy", table(tmp_path / "s")), states[-1])


@pytest.mark.parametrize("mode", ["transient", "persistent"])
def test_a_base_may_be_of_any_float_and_mix_them(tmp_path, mode):
    """F20, F22: every tensor is served in the dtype that it has in the base."""
    from safetensors.torch import save_file

    model, optimizer = small_model()
    dtypes = {"0.weight": torch.float16, "0.bias": torch.float32, "2.weight": torch.bfloat16, "2.bias": torch.float16}
    with torch.no_grad():
        model[0].weight[0, :4] = torch.tensor([7e4, -1e-8, 6e-5, float("nan")])  # beyond float16, below it, subnormal
    (tmp_path / "base").mkdir()
    held = {name: value.to(dtypes[name]) for name, value in model.state_dict().items()}
    save_file(held, tmp_path / "base" / "model.safetensors")
    base = everything(model, dtypes)
    states = []
    with attach(optimizer, model, tmp_path / "s", base=tmp_path / "base", mode=mode, config=config()) as publisher:
        for seed in range(3):
            model[2](torch.randn(4, 16)).sum().backward()
            model[0].weight.grad = torch.ones_like(model[0].weight)
            model[0].bias.grad = torch.full_like(model[0].bias, 1e-6)
            optimizer.step()
            states.append(everything(model, dtypes))
            publisher.wait(seed + 1)
    published = reader.replay(tmp_path / "s", base)
    assert [equal(*pair) for pair in zip(published[1:], states, strict=True)] == [True] * 3
    for name in dtypes:
        assert not equal({name: base[name]}, {name: states[-1][name]}), name
    checkpoint = LocalCheckpoint(tmp_path / "copy", base=tmp_path / "base")
    with Follower(str(tmp_path / "s")) as follower:
        assert [*follower.apply_to(checkpoint, until=3, timeout_s=30)][-1].version == 3
    assert equal(reader.folder(tmp_path / "copy", table(tmp_path / "s")), states[-1])


@pytest.mark.slow
def test_an_anchor_of_a_transformers_model_opens(tmp_path):
    transformers = pytest.importorskip("transformers")
    settings = transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
    )
    model = transformers.AutoModelForCausalLM.from_config(settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(optimizer, model, tmp_path, base=None, config=config(anchor_file_bytes=2000)) as publisher:
        model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
        optimizer.step()
        report = publisher.anchor()
    folder = (tmp_path / report.manifest_key).with_suffix("")
    opened = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        found = opened.get_parameter(name)
        assert torch.equal(found.view(torch.int16), parameter.detach().to(torch.bfloat16).view(torch.int16)), name
