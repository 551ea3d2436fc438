"""The receiving side of the demo: keeps a copy of the checkpoint at the trainer's newest version.

    python -m examples.demo.follow OUT LAST_VERSION

It knows the stream's URL and the base checkpoint, and nothing of the trainer: no process group, no GPU, no torch. It
prints one JSON object per version that it has proved and written, and ends when it has reached the last one.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch_delta


def main(out: Path, last_version: int) -> None:
    """Follow `out`/stream into `out`/follower until `last_version`."""
    checkpoint = torch_delta.LocalCheckpoint(out / "follower", base=out / "base")
    follower = torch_delta.Follower(str(out / "stream"), merge_from=None)  # a row of the table for every version
    for report in follower.apply_to(checkpoint, until=last_version):
        print(json.dumps(asdict(report)), flush=True)
    checkpoint.verify()  # every byte at rest, once more


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
