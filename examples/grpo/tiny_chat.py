"""A chat model small enough for a CPU, made on the spot: random Qwen3 weights in bf16, one token per character."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

if TYPE_CHECKING:
    from pathlib import Path

SPECIAL = ("<pad>", "<eos>", "<user>", "<bot>")
CHARACTERS = "abcdefghijklmnopqrstuvwxyz .0123456789"
TEMPLATE = (
    "{% for m in messages %}{{ '<user>' if m['role'] == 'user' else '<bot>' }}{{ m['content'] }}"
    "{% if m['role'] != 'user' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)

RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<bot>",
    "fields": {"content": {"close_pattern": "<eos>", "content": "text"}},
}
"""How an answer is read back; TRL knows it for the models it knows."""


def make(folder: Path, **config: Any) -> Path:
    """Write model and tokenizer to `folder`, unless they are there; `config` are fields of the model's, if not tiny."""
    if (folder / "config.json").exists():
        return folder
    words = [*SPECIAL, *CHARACTERS]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*SPECIAL, "."])), "isolated")
    tokenizer.decoder = decoders.Fuse()
    chat = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    chat.chat_template = TEMPLATE
    chat.response_template = RESPONSE
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,  # what vLLM's attention on CPU takes
    }
    made = Qwen3Config(
        vocab_size=len(words),
        max_position_embeddings=256,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        **shape | config,
    )
    Qwen3ForCausalLM(made).to(torch.bfloat16).save_pretrained(folder)
    chat.save_pretrained(folder)
    return folder
