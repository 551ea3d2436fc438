"""The checkpoint of every version, each in a folder of its own, by somebody who knows the stream and the base only.

python -m examples.demo_vllm.pull OUT NUM_VERSIONS
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch_delta


def main(out: Path, num_versions: int) -> None:
    """Fill `out`/pulled/0, 1, ..."""
    for version in range(num_versions + 1):
        folder = out / "pulled" / str(version)
        torch_delta.pull(str(out / "stream"), folder, version=version, base=out / "base").close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
