"""docs/format.md is the specification: every rule has a test, and its tables and vectors are what the code does."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from scripts import make_golden_stream
from torch_delta.format import ITEMSIZE, Commit, Schema, StreamInfo, digest_words, limits, parse_part
from torch_delta.format.encodings import ENCODINGS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "format.md").read_text()
RULE = r"[A-EG-Z][0-9]{1,2}"  # F is for field cases, cited beside rules
RULES = re.findall(rf"^- \*\*({RULE})\*\* ", DOCUMENT, flags=re.MULTILINE)
CITATION = re.compile(rf"\brules? ({RULE}(?:(?:, | and |, rule )(?:{RULE}))*)")


def citations(text: str) -> set[str]:
    """The rules that comments such as `# rule K1, field case F9` or `# rules P1 and R6` cite."""
    return {rule for group in CITATION.findall(text) for rule in re.findall(RULE, group)}


def comments(path: Path) -> str:
    return "\n".join(line.partition("# ")[2] for line in path.read_text().splitlines())


def test_citations_are_found() -> None:
    assert citations("rule K1, field case F9") == {"K1"}
    assert citations("rule K1, rule J6") == {"K1", "J6"}
    assert citations("rules P1 and R6, ruler Z9") == {"P1", "R6"}
    assert citations("no rules here, K1") == set()


def test_rules_are_numbered_without_gaps() -> None:
    groups: dict[str, list[int]] = {}
    for rule in RULES:
        groups.setdefault(rule[0], []).append(int(rule[1:]))
    assert sorted(groups) == list("ACDEHIJKLNPRSW")
    for letter, numbers in groups.items():
        assert numbers == list(range(1, len(numbers) + 1)), letter


def test_every_rule_has_a_test() -> None:
    cited = set().union(*(citations(comments(path)) for path in sorted((ROOT / "tests").rglob("test_*.py"))))
    assert sorted(set(RULES) - cited) == [], "rules of docs/format.md that no test cites as `# rule X1`"


def test_every_citation_is_a_rule() -> None:
    wrong = []
    for path in [*(ROOT / "torch_delta").rglob("*.py"), *(ROOT / "tests").rglob("test_*.py")]:
        if path != Path(__file__).resolve():
            text = path.read_text()
            cited = citations(text) | set(re.findall(rf'(?:rule=|broken\(\s*)"({RULE})"', text))
            wrong += [f"{path.relative_to(ROOT)}: {rule}" for rule in sorted(cited - set(RULES))]
    assert wrong == []


def test_limits_table() -> None:
    documented = dict(re.findall(r"^\| `(MAX_[A-Z0-9_]+)` \| ([0-9]+) \|", DOCUMENT, flags=re.MULTILINE))
    actual = {name: str(value) for name, value in vars(limits).items() if name.startswith("MAX_")}
    assert documented == actual
    assert set(re.findall(r"MAX_[A-Z0-9_]+", DOCUMENT)) == set(actual)


def test_encodings_table() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (\d+) \| (yes|no) \| (yes|no) \| (yes|no) \| (.*)$", DOCUMENT, flags=re.MULTILINE
    )
    assert {
        name: (int(code), absolute == "yes", blob == "yes", counted == "yes", "feature" in rest)
        for name, code, absolute, blob, counted, rest in rows
    } == {e.name: (e.code, e.absolute, e.blob, e.counted, e.feature is not None) for e in ENCODINGS.values()}


def test_dtypes_table() -> None:
    rows = re.findall(r"^\| ([1248]) \| ([A-Z0-9_, ]+) \|$", DOCUMENT, flags=re.MULTILINE)
    assert {name: int(width) for width, names in rows for name in names.split(", ")} == dict(ITEMSIZE)


def test_digest_vectors() -> None:
    rows = re.findall(r"^\| (.+) \| `([0-9a-f]{32})` \|$", DOCUMENT, flags=re.MULTILINE)
    old, new = (state["w"] for state in make_golden_stream.states()[:2])
    assert dict(rows) == {
        "none": digest_words([]).hex(),
        "BF16 [1.0] `3f80`": digest_words([0x3F80]).hex(),
        "BF16 [-0.0] `8000`": digest_words([0x8000]).hex(),
        "BF16 [NaN] `7fc0`": digest_words([0x7FC0]).hex(),
        "F32 [NaN] `7fc00000`": digest_words([0x7FC00000]).hex(),
        "I64 [-1]": digest_words([0xFFFFFFFF] * 2).hex(),
        "U8 [2048], element i is i mod 256": digest_words([i % 256 for i in range(2048)]).hex(),
        "BF16 w, version 0 below": digest_words(old).hex(),
        "its rows 0-1": digest_words(old[:4]).hex(),
        "its rows 2-3": digest_words(old[4:], 4).hex(),
        "BF16 w, version 1 below": digest_words(new).hex(),
    }


EXAMPLE = make_golden_stream.example()


@pytest.mark.parametrize("key", [key for key in EXAMPLE if key.endswith(".json")])
def test_objects_of_the_example(key) -> None:
    match = re.search(
        rf"^`{re.escape(key)}`(?:, sha256 `([0-9a-f]{{64}})`)?\n\n```json\n(.*?)```", DOCUMENT, re.MULTILINE | re.DOTALL
    )
    assert match is not None
    sha256, text = match.groups()
    stored = text.encode() if sha256 else text.encode().rstrip(b"\n")
    assert stored == EXAMPLE[key]
    assert (sha256 or key[len("schema/") : -len(".json")]) == hashlib.sha256(stored).hexdigest()


@pytest.mark.parametrize("key", [key for key in EXAMPLE if key.endswith(".safetensors")])
def test_parts_of_the_example(key) -> None:
    match = re.search(
        rf"^`{re.escape(key)}`, (\d+) bytes, sha256 `([0-9a-f]{{64}})`[^`]*```\n(.*?)```",
        DOCUMENT,
        re.MULTILINE | re.DOTALL,
    )
    assert match is not None
    size, sha256, text = match.groups()
    stored = EXAMPLE[key]
    assert (int(size), sha256) == (len(stored), hashlib.sha256(stored).hexdigest())
    # Drop the tensor names at the left and the words at the right; what is left are the data bytes in order.
    data = bytes.fromhex(
        "".join(re.match(r".{15}((?:[0-9a-f]{2} {1,2})*(?:[0-9a-f]{2})?)", line)[1] for line in text.splitlines())
    )
    assert stored.endswith(data)
    assert len(stored) - len(data) == 8 + int.from_bytes(stored[:8], "little")


def test_the_package_reads_the_example() -> None:
    stream = StreamInfo.from_bytes(EXAMPLE["stream.json"])
    schema = Schema.from_bytes(EXAMPLE[f"schema/{stream.schema_id}.json"], schema_id=stream.schema_id)
    key = "commits/00000000000000000001.json"
    commit = Commit.from_bytes(EXAMPLE[key], key=key)
    (total,) = stream.base.digests
    for ref in commit.parts:
        part = parse_part(EXAMPLE[ref.key], schema=schema, key=ref.key)
        part.check_reference(ref, commit)
        for item in part.slices:
            total += item.increment
    assert total == digest_words(make_golden_stream.states()[1]["w"])
    assert commit.state_sha256 == hashlib.sha256(total.to_bytes()).hexdigest()
