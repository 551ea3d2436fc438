"""Completions of token prompts over vLLM's OpenAI-compatible API, with nothing but the standard library."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

from examples.demo_vllm.settings import MODEL, PROBE_TOKENS, PROBES, REQUEST_S, ROLLOUT_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is on this machine


class Policy:
    """The served policy, by URL and API key."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self._key = key

    def samples(self, prompts: Sequence[Sequence[int]], num_samples: int, seed: int) -> list[list[list[int]]]:
        """Sampled completions, all of `ROLLOUT_TOKENS` tokens: `[prompt][sample][token]`."""
        said = self._complete(prompts, max_tokens=ROLLOUT_TOKENS, n=num_samples, temperature=1.0, seed=seed)
        tokens = [choice["token_ids"] for choice in sorted(said["choices"], key=lambda choice: choice["index"])]
        return [tokens[start : start + num_samples] for start in range(0, len(tokens), num_samples)]

    def greedy(self) -> list[list[int]]:
        """Greedy completions of the probes: what two servers of equal weights agree on."""
        said = self._complete(PROBES, max_tokens=PROBE_TOKENS, n=1, temperature=0.0, seed=None)
        return [choice["token_ids"] for choice in sorted(said["choices"], key=lambda choice: choice["index"])]

    def stream(self, prompt: Sequence[int], num_tokens: int) -> Iterator[list[int]]:
        """A sampled completion as it is generated, some tokens at a time."""
        body = _body(prompt, max_tokens=num_tokens, n=1, temperature=1.0, seed=None) | {"stream": True}
        with self._open("/v1/completions", body) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    event = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        raise OSError(f"the stream ended with {event['error']}")
                    for choice in event["choices"]:
                        yield choice.get("token_ids") or []

    def is_ready(self) -> bool:
        """Whether the server answers yet."""
        try:
            with self._open("/health", None, timeout_s=5.0):
                return True
        except OSError:
            return False

    def _complete(self, prompts: Sequence[Sequence[int]], **sampling: Any) -> dict[str, Any]:
        with self._open("/v1/completions", _body([list(prompt) for prompt in prompts], **sampling)) as answer:
            return json.load(answer)

    def _open(self, path: str, body: dict[str, Any] | None, *, timeout_s: float = REQUEST_S) -> Any:
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        try:
            return _opener.open(urllib.request.Request(self.url + path, data, headers), timeout=timeout_s)
        except urllib.error.HTTPError as error:
            raise OSError(f"{self.url}{path}: {error.code} {error.read()[:500]!r}") from error


def _body(prompt: object, **sampling: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "ignore_eos": True, "return_token_ids": True, **sampling}
