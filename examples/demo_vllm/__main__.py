"""Run the demo: `make demo-vllm`, or `python -m examples.demo_vllm` where everything is installed."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.demo.sides import DemoFailed, Sides
from examples.demo_vllm.client import Client
from examples.demo_vllm.server import Server
from examples.demo_vllm.settings import NUM_RANKS, NUM_VERSIONS, PROBE_TOKENS, PROBES, SILENCE_S
from examples.demo_vllm.table import EXPLANATION, Table

if TYPE_CHECKING:
    from collections.abc import Iterator

Greedy = dict[int, list[list[int]]]


def main(out: Path, num_versions: int) -> int:
    """Train against a server in `out` (emptied first), then compare; returns the exit status."""
    started = time.monotonic()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    try:
        print("writing a small random Qwen3, the base of trainer and server")
        for _ in run("base writer", "-m", "examples.demo_vllm.model", str(out / "base")):
            pass  # it reports nothing
        served = train(out, num_versions)
        compare(out, served, num_versions)
    except DemoFailed as error:
        print(f"\nFAILED: {error}", file=sys.stderr)
        return 1
    print(f"\nEXACT   ({time.monotonic() - started:.0f} s)")
    return 0


def train(out: Path, num_versions: int) -> Greedy:
    """Serve, stream, train; greedy completions of the served policy at every version."""
    print("starting vLLM on it")
    with Server(out) as server:
        server.wait_until_ready()
        print(f"{NUM_RANKS} FSDP2 ranks learn from its completions; a client streams the whole time\n\n{EXPLANATION}\n")
        os.environ["DEMO_KEY"] = server.key  # for the trainer
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
        trainer = [*torchrun, "-m", "examples.demo_vllm.train", str(out), server.url, str(num_versions)]
        reports: list[dict[str, Any]] = []
        verified: dict[str, Any] = {}
        with Client(server.policy) as client:
            table = Table()
            for event in run("trainer", *trainer):
                client.check()
                server.check()
                if "verified" in event:
                    verified = event["verified"]
                else:
                    reports.append(event)
                    table.add(event, client)
            client.check()
            print(
                f"\nthe client got {client.num_tokens:,} tokens in {client.num_streams} whole streams, without an error"
            )
    check_reports(reports, verified, num_versions)
    return {report["version"]: report["greedy"] for report in reports}


def check_reports(reports: list[dict[str, Any]], verified: dict[str, Any], num_versions: int) -> None:
    """All versions were taken over, the policy learned, and the server's full digest agrees."""
    if [report["version"] for report in reports] != list(range(num_versions + 1)):
        raise DemoFailed(f"versions {[report['version'] for report in reports]} instead of 0 to {num_versions}")
    first, last = reports[0]["reward"], reports[-1]["reward"]
    if last <= first:
        raise DemoFailed(f"the policy did not learn: reward {first:.3f} before, {last:.3f} after")
    if not verified.get("ok") or verified.get("version") != num_versions:
        raise DemoFailed(f"the server's digest of its live weights at version {num_versions}: {verified}")
    print(f"the server digested all of its live weights at version {num_versions}: as published")


def compare(out: Path, served: Greedy, num_versions: int) -> None:
    """The served policy at every version against a vLLM that was started from the pulled checkpoint of it."""
    print(
        f"\ngreedy completions ({len(PROBES)} prompts, {PROBE_TOKENS} tokens each) of the server once it was at a "
        "version,\nagainst those of a fresh vLLM started from the checkpoint pulled at that version:"
    )
    for _ in run("puller", "-m", "examples.demo_vllm.pull", str(out), str(num_versions)):
        pass  # it reports nothing
    different, num_compared = [], 0
    for event in run("fresh vLLM", "-m", "examples.demo_vllm.fresh", str(out), str(num_versions)):
        version, fresh = event["version"], event["greedy"]
        num_compared += 1
        verdict = "equal" if fresh == served[version] else "DIFFERENT"
        if version > 0:
            verdict += ", and as the version before" if fresh == served[version - 1] else ", and new"
        print(f"  version {version}: {verdict}", flush=True)
        if fresh != served[version]:
            different.append(version)
    if num_compared != num_versions + 1:
        raise DemoFailed(f"only {num_compared} of {num_versions + 1} versions were compared")
    if different:
        raise DemoFailed(f"the served policy is not the published one at versions {different}")


def run(name: str, *arguments: str) -> Iterator[dict[str, Any]]:
    """Run one Python process to its end, which must be a good one; what it reports, as it comes."""
    with Sides({name: arguments}, SILENCE_S) as sides:
        for _, event in sides.events():
            yield event


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="make demo-vllm", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-vllm-out"), help="working folder, emptied first")
    parser.add_argument("--versions", type=int, default=NUM_VERSIONS, help="optimizer steps, each a version")
    chosen = parser.parse_args()
    sys.exit(main(chosen.out.absolute(), chosen.versions))
