"""Writing many slices into the mapped weights at once: the same bytes as one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from torch_delta.codec.kernels import OVERWRITE
from torch_delta.format.box import Box
from torch_delta.format.schema import Schema, TensorSpec
from torch_delta.receive.folder import SafetensorsFolder
from torch_delta.receive.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SHAPE = (12, 40)
KINDS = {"U8": np.uint8, "U16": np.uint16, "F32": np.float32, "F64": np.float64}
BOXES = [Box.whole(SHAPE), Box((3, 0), (5, 40)), Box((2, 7), (9, 30)), Box((11, 39), (1, 1))]


@pytest.fixture(scope="module")
def mapped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weights]:
    folder = tmp_path_factory.mktemp("weights")
    yield from _mapped(folder)


def _mapped(folder: Path) -> Iterator[Weights]:
    save_file({f"w.{name}": np.zeros(SHAPE, kind) for name, kind in KINDS.items()}, folder / "model.safetensors")
    schema = Schema(tuple(TensorSpec(f"w.{name}", name, SHAPE) for name in sorted(KINDS)))
    with Weights(SafetensorsFolder.open(folder), schema, writable=True) as weights:
        yield weights


@pytest.fixture(params=["compiled", "reference"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for kernel in OVERWRITE.values():
        chosen = kernel.compile() if request.param == "compiled" else None
        monkeypatch.setattr(kernel, "get", lambda _, chosen=chosen: chosen)
    return request.param


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_many_slices_as_one_by_one(way: str, mapped: Weights, data: st.DataObject) -> None:
    assert way
    rng = np.random.default_rng(data.draw(st.integers(0, 9999)))
    expected = {}
    slices = []
    for tensor, spec in enumerate(mapped.schema.tensors):
        whole = rng.integers(0, 256, mapped.flat(tensor).nbytes, np.uint8).view(mapped.flat(tensor).dtype)
        mapped.flat(tensor)[:] = whole
        box = data.draw(st.sampled_from(BOXES))
        share = data.draw(st.sampled_from([None, 0.0, 0.1, 1.0]))
        index = None if share is None else np.flatnonzero(rng.random(box.numel) < share)
        count = box.numel if index is None else index.size
        value = rng.integers(0, 256, count * whole.itemsize, np.uint8).view(whole.dtype)
        region = whole.reshape(spec.shape)[
            tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))
        ]
        for place, bits in zip(range(box.numel) if index is None else index.tolist(), value.tolist(), strict=True):
            region[np.unravel_index(place, box.shape)] = bits
        expected[tensor] = whole
        kind = data.draw(st.sampled_from([np.uint32, np.uint64]))
        slices.append((tensor, box, None if index is None else index.astype(kind), value))
    mapped.overwrite_all(slices)
    for tensor, whole in expected.items():
        assert mapped.flat(tensor).tolist() == whole.tolist()


def test_a_position_outside_the_tensor_is_refused(way: str, tmp_path: Path) -> None:
    assert way
    for weights in _mapped(tmp_path):
        index = np.array([0, weights.flat(0).size], np.uint32)
        with pytest.raises(IndexError):
            weights.overwrite_all([(0, Box.whole(SHAPE), index, np.ones(2, weights.flat(0).dtype))])
        assert all(not weights.flat(tensor).any() for tensor in range(1, len(KINDS)))


def test_arrays_that_no_address_describes(way: str, tmp_path: Path) -> None:
    assert way
    for weights in _mapped(tmp_path):
        kind = weights.flat(0).dtype
        index, value = np.arange(0, 20, dtype=np.uint32)[::2], np.arange(1, 31, dtype=kind)[::3]
        weights.overwrite_all([(0, Box.whole(SHAPE), index, value)])
        assert weights.flat(0)[:20].tolist() == [one for k in range(10) for one in (3 * k + 1, 0)]
        with pytest.raises(ValueError, match="shape mismatch"):
            weights.overwrite_all([(0, Box.whole(SHAPE), np.arange(3, dtype=np.uint32), np.ones(2, kind))])
