"""Programs read the JSON: every field there is must be in docs/cli.md, and every documented one must be there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from tests.cli.streams import base_state, three_versions, write_checkpoint
from torch_delta.cli import main

if TYPE_CHECKING:
    import pytest

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
FREE = {"info"}  # strings by names that the writer chose


def fields(value: object) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(fields, value))
    if not isinstance(value, dict):
        return set()
    return set(value).union(*(fields(inner) for name, inner in value.items() if name not in FREE))


def test_every_field_is_documented_and_every_documented_field_exists(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    maker = three_versions(tmp_path / "stream")
    base = write_checkpoint(tmp_path / "base", base_state())
    (maker.root / maker.publish({"b.bias": {0: 1}}).parts[0].key).unlink()
    url, copy = str(maker.root), str(tmp_path / "copy")
    for argv in (
        ["log", url],
        ["inspect", url, "1"],
        ["inspect", url, maker.stream.commit(1).commit.parts[0].key],
        ["pull", url, copy, "--base", str(base), "--version", "3"],
        ["verify", url, "--checkpoint", copy],  # with a problem: a part is gone
        ["anchor", url, copy],
        ["gc", url, "--dry-run"],
        ["doctor", str(tmp_path / "empty")],
        ["estimate", str(base), copy],
        ["log", str(tmp_path / "nothing")],
    ):
        main([*argv, "--json"])
    found = set().union(*(fields(json.loads(line)) for line in capsys.readouterr().out.splitlines()))
    said = DOCUMENT.read_text().partition("## JSON")[2]
    documented = set(re.findall(r"`([a-z_0-9]+)`", said))
    commands = {"log", "verify", "inspect", "pull", "follow", "estimate", "gc", "doctor"}
    values_and_commands = commands | {"delta", "anchor", "shared"}
    assert found == documented - values_and_commands
