"""The numbers of the demo."""

NUM_RANKS = 2
NUM_VERSIONS = 8
"""Optimizer steps; each is a version that the server takes over before the next one's rollouts."""
NUM_PROMPTS = 4
"""Prompts per rank and step."""
NUM_SAMPLES = 16
"""Completions per prompt: the group within which rewards are compared."""
PROMPT_TOKENS = 6
ROLLOUT_TOKENS = 24
LEARNING_RATE = 8e-4
"""Far above what fine-tuning uses, so that eight steps show; so is the share of weights that change."""

VOCAB_SIZE = 512
FIRST_WORD = 4
"""Tokens below are special."""
REWARDED = range(FIRST_WORD, FIRST_WORD + 127)
"""A token earns 1 if it is one of these, else 0: about a quarter of what is sampled before training."""

PROBES = ([10, 200, 300, 44], [511, 5, 77], [123], [400, 400, 9, 31, 250])
"""Prompts whose greedy completions are compared between the server and a fresh one."""
PROBE_TOKENS = 32

MODEL = "policy"
"""Name it is served under."""
START_S = 600.0
"""For the server to be ready."""
SILENCE_S = 600.0
"""How long all processes of a phase together may say nothing before the demo gives up."""
REQUEST_S = 300.0
"""For one request to the server."""
