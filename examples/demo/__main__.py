"""Run the demo: `make demo`, or `python -m examples.demo` where everything is installed."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

from examples.demo.compare import differences
from examples.demo.settings import LEARNING_RATE, NUM_PAIRS, NUM_RANKS, NUM_STEPS, SILENCE_S
from examples.demo.sides import DemoFailed, Sides
from examples.demo.table import Table


def main(out: Path, num_steps: int) -> int:
    """Train and follow in `out` (emptied first), then compare; returns the exit status."""
    started = time.monotonic()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    try:
        prepare(out)
        train_and_follow(out, num_steps)
    except DemoFailed as error:
        print(f"\nFAILED: {error}", file=sys.stderr)
        return 1
    found, num_bytes = differences(out / "follower", out / "trainer")
    print(f"\nthe follower's files against the trainer's weights gathered in bf16, {num_bytes:,} bytes, every bit:")
    if found:
        print("DIFFERENT", *found, sep="\n  ")
        return 1
    tool = os.path.relpath(Path(sys.executable).with_name("torch-delta"))
    print(f"EXACT   ({time.monotonic() - started:.0f} s)\n\nto look at the stream: {tool} log {out / 'stream'}")
    return 0


def prepare(out: Path) -> None:
    """Write the base checkpoint, in a process of its own: this one stays free of torch."""
    print("writing the pretrained encoder's bf16 checkpoint, the base of both sides")
    with Sides({"base writer": ["-m", "examples.demo.model", str(out / "base")]}, SILENCE_S) as sides:
        for _ in sides.events():
            pass


def train_and_follow(out: Path, num_steps: int) -> None:
    """Run both sides, and print a line for every version when both have reported it."""
    print(
        f"{NUM_RANKS} FSDP2 ranks fine-tune it: {num_steps} steps of {NUM_RANKS * NUM_PAIRS} sentence pairs, AdamW at "
        f"{LEARNING_RATE:g}, fp32 masters;\nevery step is published, and a process of its own follows\n"
    )
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
    commands = {
        "trainer": [*torchrun, "-m", "examples.demo.train", str(out), str(num_steps)],
        "follower": ["-m", "examples.demo.follow", str(out), str(num_steps)],
    }
    table = Table()
    with Sides(commands, SILENCE_S) as sides:
        for side, report in sides.events():
            table.add(side, report)
    if table.num_printed != num_steps:
        raise DemoFailed(f"only {table.num_printed} of {num_steps} versions were published and followed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="working folder, emptied first")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="optimizer steps, each a version")
    arguments = parser.parse_args()
    sys.exit(main(arguments.out, arguments.steps))
