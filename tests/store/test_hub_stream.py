"""A stream in a Hub bucket from end to end: published from tensors, followed into a folder, and restarted."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402

from tests.store.fake_hub import EntryFault, HubFault  # noqa: E402
from tests.store.hubs import split  # noqa: E402
from torch_delta import Follower, LocalCheckpoint, TensorSource, attach_source, open_store  # noqa: E402
from torch_delta.publish.base import open_base  # noqa: E402


def weights(step: int) -> dict[str, torch.Tensor]:
    made = {name: torch.arange(6000, dtype=torch.float32).reshape(60, 100) / 100 for name in ("a.weight", "b.weight")}
    for number, tensor in enumerate(made.values()):
        tensor[step % 7 :: 5, number::9] += step
    return {name: tensor.bfloat16() for name, tensor in made.items()}


@pytest.fixture
def base(tmp_path):
    (tmp_path / "base").mkdir()
    save_file(weights(0), tmp_path / "base" / "model.safetensors")
    return tmp_path / "base"


def publish(url: str, base, steps) -> int:
    current = weights(0)
    with open_store(url) as store:
        source = TensorSource(current.items, open_base(base).schema)
        publisher = attach_source(source, store, base=base)
        try:
            for step in steps:
                current.update(weights(step))
                publisher.wait(publisher.publish())
            return publisher.version
        finally:
            publisher.close()


def follow(url: str, base, path) -> dict[str, torch.Tensor]:
    follower = Follower(url)
    try:
        checkpoint = LocalCheckpoint(path, base=base)
        for _ in follower.apply_to(checkpoint, until="head"):
            pass
    finally:
        follower.close()
    return load_file(path / "model.safetensors")


def test_versions_go_through_a_bucket_bit_for_bit_although_the_hub_fails_now_and_then(hub, hub_url, base, tmp_path):
    hub.entry_faults.append(EntryFault("parts/"))  # F76
    lost = hub.add(HubFault("POST .*/batch", is_after=True, num_times=2))
    late = hub.add(HubFault("GET /buckets/", status=503, num_times=2))
    assert publish(hub_url, base, [1, 2, 3]) == 3
    found = follow(hub_url, base, tmp_path / "copy")
    assert (hub.entry_faults[0].num_fired, lost.num_fired, late.num_fired) == (1, 2, 2)
    for name, tensor in weights(3).items():
        assert torch.equal(found[name].view(torch.int16), tensor.view(torch.int16))
    assert not any("/.claims/" in path for path in hub.buckets[split(hub_url)[0]])
