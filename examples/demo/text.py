"""Real English text that is on every machine with Python: the language reference that `help()` shows."""

from __future__ import annotations

import random
import re
from pydoc_data.topics import topics

_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_MIN_WORDS = 8


def sentence_pairs(seed: int) -> list[tuple[str, str]]:
    """Neighbouring sentences of one paragraph: close in meaning, so the model should embed them close together.

    Returns:
        The pairs in an order that depends on `seed` alone.
    """
    pairs = []
    for _, topic in sorted(topics.items()):
        for paragraph in topic.split("\n\n"):
            if not paragraph[:1].isalpha():
                continue  # indented code, lists, tables, underlined headings
            sentences = [" ".join(part.split()) for part in _SENTENCE.split(paragraph)]
            sentences = [part for part in sentences if len(part.split()) >= _MIN_WORDS]
            pairs += zip(sentences[::2], sentences[1::2], strict=False)
    random.Random(seed).shuffle(pairs)
    return pairs
