"""Tied weights in a checkpoint that stores them under both names, and tensors that only some trainers export."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.skyrl.checkpoints import bits_of, same, write
from tests.skyrl.toys import Run, step, toy
from torch_delta.errors import TorchDeltaError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.skyrl, pytest.mark.slow, pytest.mark.usefixtures("seat")]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def both_names(folder: Path) -> tuple[Path, dict[str, Any]]:
    """A tied base that stores the pair twice, and the trainer's tensors, one of which has two names."""
    tensors = toy()
    tensors[HEAD] = tensors[EMBEDDING].clone()
    base = write(folder / "base", tensors, tied=True)
    tensors[HEAD] = tensors[EMBEDDING]
    return base, tensors


@pytest.mark.parametrize("left_out", ["", HEAD, EMBEDDING])
def test_both_names_follow_whichever_the_trainer_exports(tmp_path: Path, left_out: str) -> None:
    base, tensors = both_names(tmp_path)
    run = Run(tmp_path, {name: tensor for name, tensor in tensors.items() if name != left_out}, base)
    for number in range(2):
        step(run.tensors, number)
        run.send()
        assert same(run.server.loaded, bits_of(tensors)) == []
    run.end()
    # Another trainer goes on with it, which exports both.
    again = Run(tmp_path / "again", tensors, base, sync_dir=run.stream, server=run.server)
    step(tensors, 7)
    assert again.send() == 3
    assert same(again.server.loaded, bits_of(tensors)) == []
    again.close()


def test_a_pair_that_came_apart_is_refused_by_name(tmp_path: Path) -> None:
    base, tensors = both_names(tmp_path)
    run = Run(tmp_path, tensors, base)
    assert run.send() == 1
    tensors[HEAD] = tensors[HEAD].clone()
    tensors[HEAD][0, 0] += 1.0
    with pytest.raises(TorchDeltaError, match=r"embed_tokens\.weight and lm_head\.weight"):
        run.send()
    assert run.server.version == 1
    run.close()


def test_a_base_whose_two_names_differ_keeps_them_apart(tmp_path: Path) -> None:
    """The configuration says tied, the file does not: what servers hold under each name is what was sent under it."""
    tensors = toy()
    base = write(tmp_path / "base", tensors, tied=True)
    run = Run(tmp_path, tensors, base)
    step(tensors, 1)
    run.send()
    assert same(run.server.loaded, bits_of(tensors)) == []
    run.close()


def test_what_a_trainer_does_not_export_stays_where_the_stream_stands_and_not_where_it_began(tmp_path: Path) -> None:
    tensors = toy()
    run = Run(tmp_path, tensors)
    step(tensors, 1)
    run.send()
    run.end()
    kept = bits_of(tensors)["model.norm.weight"]
    less = {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}
    again = Run(tmp_path / "again", less, run.base, sync_dir=run.stream, server=run.server)
    step(less, 2)
    assert again.send() == 2
    assert same(again.server.loaded, bits_of(less) | {"model.norm.weight": kept}) == []
    again.close()
