"""Every family in a whole vLLM, in this process: updates, and a reload, end with the bits of a fresh engine.

tests/vllm/test_models.py looks at routes more closely, without an engine around them. Weights are compared in the live
engine, buffers and all, after the update: a checksum of what travelled would not have shown what a loader makes of
aliases, fused experts or a second load (F12, F28).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.vllm.engines import Engine, differing
from tests.vllm.following import Following
from tests.vllm.tiny import PARAMETERS_ONLY, Versions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("family", "plan", "by_reload"),
    [
        ("mamba", {"mixed", "reload"}, "A_log"),  # the loader stores -exp(A_log)
        ("falcon", {"mixed", "reload"}, "query_key_value"),  # the loader reorders heads
        ("qwen3_moe", {"patch"}, None),
        ("mixtral", {"patch"}, None),
        ("qwen2-tied", {"patch"}, None),
        ("llama", {"patch"}, None),
        ("gemma2", {"patch"}, None),
    ],  # qwen3: test_engine_live.py
)
def test_updates_end_with_the_bits_of_a_fresh_engine(
    family: str,
    plan: set[str],
    by_reload: str | None,
    tmp_path: Path,
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_DELTA_ALLOWED_PATHS", str(tmp_path))
    monkeypatch.setenv("TORCH_DELTA_CHECKPOINT_ROOT", str(tmp_path / "root"))
    family, _, tied = family.partition("-")
    base = checkpoint(family, tied=True) if tied else checkpoint(family)
    with Versions(base, tmp_path / "stream") as versions, Engine(base, delta=True) as engine:
        following = Following(engine, versions)
        status = following.init()
        assert (status["version"], status["ready"]) == (0, True)
        if by_reload is None:
            assert status["routes"]["reload"] == {}
        else:
            assert any(by_reload in name for name in status["routes"]["reload"])
        versions.sparse(1)
        versions.dense(2)
        assert following.prepare()["plan"] in plan
        following.update(2)
        versions.sparse(3)
        following.to_newest()
        patched = engine.parameters()
        following.update(3, mode="reload")
        assert differing(patched, engine.parameters()) == []
        with Engine(versions.write(3, tmp_path / "fresh"), delta=True) as fresh:
            assert differing(patched, fresh.parameters()) == []
            if family not in PARAMETERS_ONLY:
                assert engine.greedy() == fresh.greedy()
