"""The prompts and the reward: completions in which more letters are vowels score higher. Any model can learn that."""

from __future__ import annotations

from typing import Any

from datasets import Dataset

PROMPTS = ("say something", "and now", "tell me more", "once upon a time")


def prompts(num_prompts: int) -> Dataset:
    """Conversations of one message each."""
    rows = [[{"role": "user", "content": PROMPTS[number % len(PROMPTS)]}] for number in range(num_prompts)]
    return Dataset.from_dict({"prompt": rows})


def vowels(completions: list[Any], **_: object) -> list[float]:
    """Share of each completion's characters that are vowels, 0 to 1."""
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [sum(character in "aeiou" for character in text.lower()) / max(len(text), 1) for text in texts]
