"""Which folders a trainer may name to a server: those of the operator, if he named any (F116)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from torch_delta.errors import RequestRefused
from torch_delta.vllm.config import ALLOWED_PATHS, CHECKPOINT_ROOT, InitInfo, Operator, parse, resolve
from torch_delta_skyrl.requests import init_payload, init_request

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.skyrl, pytest.mark.usefixtures("seat")]


def asked(stream: Path, base: Path, checkpoint: Path) -> InitInfo:
    payload = init_payload(stream=str(stream), base_model_path=str(base), local_checkpoint_dir=str(checkpoint))
    info: InitInfo = parse(InitInfo, init_request(payload))
    return info


@pytest.mark.parametrize("outside", ["stream", "base", "checkpoint"])
def test_with_folders_of_the_operator_the_rule_is_that_of_our_own_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outside: str
) -> None:
    from torch_delta_skyrl.receiver import operator

    inside = tmp_path / "inside"
    named = {name: inside / name for name in ("stream", "base", "checkpoint")}
    monkeypatch.setenv(CHECKPOINT_ROOT, str(tmp_path / "root"))
    monkeypatch.setenv(ALLOWED_PATHS, str(inside))
    assert operator().allowed == Operator.from_environment().allowed
    assert resolve(asked(**named), operator(), "served").checkpoint == inside / "checkpoint"
    named[outside] = inside / ".." / "elsewhere"
    with pytest.raises(RequestRefused, match=f"{outside} .* lies outside the folders"):
        resolve(asked(**named), operator(), "served")


def test_without_any_a_trainer_names_what_it_wants_as_with_skyrls_own_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch_delta_skyrl.receiver import operator

    monkeypatch.delenv(ALLOWED_PATHS, raising=False)
    settings = resolve(asked(tmp_path / "a", tmp_path / "b", tmp_path / "c"), operator(), "served")
    assert (settings.stream, settings.checkpoint) == (str(tmp_path / "a"), tmp_path / "c")
