"""The one line: a real optimizer and model, published from the optimizer's own step."""

from __future__ import annotations

import pytest
import torch

from tests.publish import reader
from tests.publish.support import config
from torch_delta import attach
from torch_delta.errors import PublishFailed
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


def first_state(root):
    stream = reader.sealed(root / "stream.json")
    table = reader.json.loads((root / "schema" / f"{stream['schema']}.json").read_bytes())["tensors"]
    (folder,) = [path for path in (root / "anchors").iterdir() if path.is_dir() and path.name.startswith("0" * 20)]
    return reader.folder(folder, table)


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
