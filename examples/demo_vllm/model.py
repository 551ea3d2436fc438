"""The policy: a small Qwen3 with random weights and a tokenizer whose words are "w4 w5 w6 ..."; nothing is fetched."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from examples.demo_vllm.settings import FIRST_WORD, VOCAB_SIZE

_SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]


def write_base(folder: Path) -> None:
    """Write the bf16 checkpoint that trainer and server start from."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.06,  # larger than usual, so that an untrained policy has opinions
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    words = _SPECIAL + [f"w{token}" for token in range(FIRST_WORD, VOCAB_SIZE)]
    vocabulary = models.WordLevel({word: token for token, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = Tokenizer(vocabulary)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), _SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def load(folder: Path) -> torch.nn.Module:
    """The policy for training: fp32 masters of the base's bf16 weights."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


if __name__ == "__main__":
    write_base(Path(sys.argv[1]))
