"""A bf16 stream into an engine that quantises its weights after loading: int8, weight only, by torchao, on CPU."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.engines import Engine
from tests.vllm.following import Following
from tests.vllm.tiny import Versions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


def quantised() -> dict[str, Any]:
    """Arguments of an engine that quantises its linear weights."""
    from torchao.core.config import config_to_dict
    from torchao.quantization import Int8WeightOnlyConfig

    config = json.dumps(config_to_dict(Int8WeightOnlyConfig()))
    return {"quantization": "torchao", "hf_overrides": {"quantization_config_dict_json": config}}


def test_a_quantised_engine_is_what_a_fresh_one_is(
    tmp_path: Path, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = quantised()
    monkeypatch.setenv("TORCH_DELTA_ALLOWED_PATHS", str(tmp_path))
    monkeypatch.setenv("TORCH_DELTA_CHECKPOINT_ROOT", str(tmp_path / "root"))
    base = checkpoint("qwen3")
    with Versions(base, tmp_path / "stream") as versions, Engine(base, delta=True, **options) as engine:
        following = Following(engine, versions)
        status = following.init()
        assert (status["version"], status["ready"]) == (0, True)
        slow = {name.partition("layers.0.")[2] for name in status["routes"]["reload"] if "layers.0." in name}
        assert slow == {
            f"{part}.weight"
            for part in (
                "self_attn.q_proj",
                "self_attn.k_proj",
                "self_attn.v_proj",
                "self_attn.o_proj",
                "mlp.gate_proj",
                "mlp.up_proj",
                "mlp.down_proj",
            )
        }
        before = engine.greedy()
        versions.sparse(1, fraction=0.3)
        versions.dense(2)
        assert following.prepare()["plan"] == "mixed", "embeddings and norms have routes"
        following.update(2)
        after = engine.greedy()
        versions.sparse(3, names=["model.norm.weight"])
        assert following.prepare()["plan"] == "patch"
        following.update(3)
        last, values = engine.greedy(), integers(engine)
        with Engine(versions.write(3, tmp_path / "fresh"), **options) as fresh:
            assert last == fresh.greedy()
            assert values == integers(fresh)
        assert len({str(tokens) for tokens in (before, after)}) == 2


def integers(engine: Engine) -> dict[str, tuple[bytes, bytes]]:
    """What the quantised weights hold: integers and scales."""
    found = {
        name: (weight.qdata.numpy().tobytes(), weight.scale.float().numpy().tobytes())
        for name, weight in engine.model.named_parameters()
        if hasattr(weight, "qdata")
    }
    assert found
    return found
