"""Sleep level 2 drops the weights of a GPU engine; the next update brings them back (F120)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.vllm.engines import Engine, differing
from tests.vllm.following import Following
from tests.vllm.tiny import Versions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.gpu, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device: CPU engines do not sleep")


def test_weights_lost_in_sleep_come_back_with_the_next_update(
    tmp_path: Path, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DELTA_ALLOWED_PATHS", str(tmp_path))
    monkeypatch.setenv("TORCH_DELTA_CHECKPOINT_ROOT", str(tmp_path / "root"))
    base = checkpoint("qwen3")
    with Versions(base, tmp_path / "stream") as versions, Engine(base, delta=True, enable_sleep_mode=True) as engine:
        following = Following(engine, versions)
        following.init()
        versions.sparse(1)
        following.to_newest()
        before = engine.parameters()
        engine.llm.sleep(level=2)
        status = following.status()
        assert (status["state"], status["ready"]) == ("lost", False)
        engine.llm.wake_up(tags=["weights"])
        following.update(1)
        engine.llm.wake_up(tags=["kv_cache"])
        assert differing(before, engine.parameters()) == []
        assert following.status()["ready"]
