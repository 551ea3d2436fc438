"""What a follower leaves behind is an ordinary checkpoint: `from_pretrained` opens it at every version."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.receive.handmade import Trainer, read_folder
from torch_delta.receive import Follower, LocalCheckpoint

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("tied", [False, True])
def test_from_pretrained_opens_every_version(tmp_path: Path, place: Path, tied: bool) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    base = tmp_path / "base"
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(base)
    bits = read_folder(base)
    ties = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
    assert ("lm_head.weight" in bits) == (not tied)
    trainer = Trainer(tmp_path / "stream", dict.fromkeys(bits, "BF16"), bits, ties).start()
    checkpoint = LocalCheckpoint(place, base=base)
    rng = np.random.default_rng(0)
    models: list = []
    with Follower(str(trainer.root)) as follower:
        for version in range(1, 4):
            trainer.step(rng)
            list(follower.apply_to(checkpoint, until=version))
            with checkpoint.reading() as folder:
                # F25: a copy, because what is loaded are views of files that change in place
                model = copy.deepcopy(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
            models.append((model, {name: bits.copy() for name, bits in trainer.bits.items()}))
    for model, expected in models:
        for name, tensor in model.state_dict().items():
            got = tensor.view(torch.int16).numpy().view("<u2")
            np.testing.assert_array_equal(got, expected[ties.get(name, name)])
