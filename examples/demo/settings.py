"""The numbers of the demo."""

NUM_RANKS = 2
NUM_STEPS = 20
NUM_PAIRS = 12
"""Sentence pairs per rank and step."""
LEARNING_RATE = 2e-6
WARMUP_STEPS = 4
SILENCE_S = 120.0
"""How long all processes together may say nothing before the demo gives up."""
