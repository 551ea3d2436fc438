"""Arguments of both examples: with none of them everything is made here; with them it is a real run."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from grpo.reward import Remote, vowels
from grpo.server import server
from grpo.tiny_chat import make

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Run(NamedTuple):
    """Where everything is."""

    model: str
    stream: str
    server: str
    out: Path
    steps: int
    is_tiny: bool
    """The model was made here."""
    reward: Callable[..., list[float]]


@contextlib.contextmanager
def run(description: str, *, needs_server: bool = True) -> Iterator[Run]:
    """Read the arguments; make the model and start the server that they do not name."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or Hub id; default: a tiny model made here")
    parser.add_argument("--stream", help="s3://, gs://, az://, hf://buckets/... or a folder; default: in --out")
    parser.add_argument("--server", help="URL of a running vLLM server; default: one started here")
    parser.add_argument("--environment", help="URL of grpo/environment.py, which scores; default: scored here")
    parser.add_argument("--out", type=Path, default=Path("grpo-out"), help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps; default: %(default)s")
    options = parser.parse_args()
    out = options.out.absolute()
    is_main = int(os.environ.get("RANK", "0")) == 0
    if is_main:
        out.mkdir(parents=True, exist_ok=True)
        logging.basicConfig(format="%(message)s")
        logging.getLogger("torch_delta").setLevel(logging.INFO)
    is_tiny = options.model is None
    model = str(make(out / "model") if is_tiny and is_main else options.model or out / "model")
    with contextlib.ExitStack() as stack:
        url = options.server
        if url is None and needs_server:
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                parser.error("with several trainer processes, start the server first and name it: --server URL")
            url = stack.enter_context(server(model, out))
        reward = vowels if options.environment is None else Remote(options.environment)
        yield Run(model, options.stream or str(out / "stream"), url or "", out, options.steps, is_tiny, reward)


def show(history: list[dict[str, float]]) -> None:
    """What a person wants to see of a run: does the reward rise, and what did a synchronisation cost."""
    print(f"\n{'step':>5} {'reward':>8} {'version':>8} {'changed':>9} {'bytes':>10} {'prepare s':>10} {'pause s':>8}")
    for row in history:
        if "reward" in row and "delta/version" in row:
            print(
                f"{row['step']:>5} {row['reward']:>8.3f} {row['delta/version']:>8.0f} "
                f"{row.get('delta/changed_fraction', 0.0):>9.2%} {row.get('delta/stored_bytes', 0):>10,.0f} "
                f"{row['delta/prepare_s']:>10.3f} {row['delta/pause_s']:>8.3f}"
            )
