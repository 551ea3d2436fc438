"""The prompts and the reward: completions in which more letters are vowels score higher. Any model can learn that."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from grpo.environment import score

PROMPTS = ("say something", "and now", "tell me more", "once upon a time")


def prompts(num_prompts: int) -> Dataset:
    """Conversations of one message each."""
    rows = [[{"role": "user", "content": PROMPTS[number % len(PROMPTS)]}] for number in range(num_prompts)]
    return Dataset.from_dict({"prompt": rows})


def vowels(completions: list[Any], **_: object) -> list[float]:
    """Scored here."""
    return [score(text) for text in texts(completions)]


@dataclass(frozen=True)
class Remote:
    """Scored by an environment behind HTTP (`grpo/environment.py`). An object: TRL sends it to another process."""

    url: str
    timeout_s: float = 60.0
    __name__ = "remote"  # under which TRL logs it

    def __call__(self, completions: list[Any], **_: object) -> list[float]:
        request = urllib.request.Request(
            f"{self.url.rstrip('/')}/score",
            data=json.dumps({"completions": texts(completions)}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
            return [float(reward) for reward in json.load(answer)["rewards"]]


def texts(completions: list[Any]) -> list[str]:
    """What was said, of plain completions and of conversations."""
    return [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
