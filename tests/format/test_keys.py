"""Keys: the grammar, the forms, and what hostile names meet (field cases F77, F117)."""

from __future__ import annotations

import pytest

from torch_delta.format import keys

NONCE = "0123456789abcdef"
V7 = "00000000000000000007"
GOOD = {
    keys.STREAM_KEY: "stream.json",
    keys.schema_key("ab" * 32): f"schema/{'ab' * 32}.json",
    keys.part_key(7, 3, 12, NONCE): f"parts/{V7}/00003-0012-{NONCE}.safetensors",
    keys.commit_key(7): f"commits/{V7}.json",
    keys.anchor_key(0, NONCE): f"anchors/{'0' * 20}-{NONCE}.json",
    keys.anchor_file_key(7, NONCE, "README.md"): f"anchors/{V7}-{NONCE}/README.md",
}


@pytest.mark.parametrize(("built", "literal"), GOOD.items())
def test_keys_have_their_documented_form(built, literal) -> None:
    assert built == literal
    assert keys.validate_key(built) == literal


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/etc/passwd",
        "../stream.json",
        "parts/../../x",
        "parts/..",
        "a//b",
        "a/",
        "a/./b",
        ".hidden",
        "commits/\x00.json",
        "stream.json\n",
        "Stream.json",
        "commits/A.json",
        "a\\b",
        "c:/x",
        "a b",
        "tensör",
        f"anchors/{V7}-{NONCE}/../README.md",
        f"anchors/{V7}-{NONCE}/sub/README.md",
        f"anchors/{V7}-{NONCE}/.gitattributes",
        f"anchors/{V7}-{NONCE.upper()}/README.md",
        f"parts/{V7}-{NONCE}/README.md",
    ],
)
def test_keys_outside_the_grammar_are_refused(key, refuses) -> None:  # rule K1
    with refuses("K1"):
        keys.validate_key(key)


def test_long_keys_are_refused(refuses) -> None:  # rule K2
    segment = "a" * 200
    assert keys.validate_key(f"{segment}/{segment}")
    with refuses("K2"):
        keys.validate_key(segment + "a")
    with refuses("K2"):
        keys.validate_key("/".join(["a" * 100] * 6))
    with refuses("K2"):
        keys.anchor_file_key(7, NONCE, "A" * 201)


@pytest.mark.parametrize(
    ("parse", "key"),
    [
        (keys.parse_commit_key, "commits/7.json"),
        (keys.parse_commit_key, f"commits/{V7}.json.tmp"),
        (keys.parse_commit_key, f"commits/{'0' * 20}.json"),
        (keys.parse_commit_key, "commits/00009007199254740992.json"),
        (keys.parse_commit_key, f"commits/{V7}.json\n"),
        (keys.parse_commit_key, "commits/0000000000000000000\u0667.json"),
        (keys.parse_part_key, f"parts/{V7}/3-0012-{NONCE}.safetensors"),
        (keys.parse_part_key, f"parts/{V7}/00003-0012-{NONCE.upper()}.safetensors"),
        (keys.parse_part_key, f"parts/{'0' * 20}/00003-0012-{NONCE}.safetensors"),
        (keys.parse_part_key, f"../parts/{V7}/00003-0012-{NONCE}.safetensors"),
        (keys.parse_schema_key, "schema/abc.json"),
        (keys.parse_schema_key, f"schema/{'AB' * 32}.json"),
        (keys.parse_anchor_key, f"anchors/{V7}.json"),
        (keys.parse_anchor_key, f"anchors/{V7}-{NONCE}/x.json"),
        (keys.parse_anchor_key, f"anchors/{'9' * 20}-{NONCE}.json"),
        (keys.parse_anchor_file_key, f"anchors/{V7}-{NONCE}/.."),
        (keys.parse_anchor_file_key, f"anchors/{'9' * 20}-{NONCE}/x.json"),
    ],
)
def test_keys_of_another_form_are_refused(parse, key, refuses) -> None:  # rule K3
    with refuses("K3"):
        parse(key)


@pytest.mark.parametrize(
    ("build", "arguments"),
    [
        (keys.version_name, (-1,)),
        (keys.version_name, (2**53,)),
        (keys.commit_key, (0,)),
        (keys.part_key, (0, 0, 0, NONCE)),
        (keys.part_key, (1, 100_000, 0, NONCE)),
        (keys.part_key, (1, 0, 10_000, NONCE)),
        (keys.part_key, (1, 0, 0, "../../../../evil")),
        (keys.anchor_key, (1, "")),
        (keys.schema_key, ("../x",)),
    ],
)
def test_keys_out_of_range_are_not_built(build, arguments, refuses) -> None:  # rule K3
    with refuses("K3"):
        build(*arguments)


def test_parsers_undo_builders() -> None:
    part = keys.parse_part_key(f"parts/{V7}/00003-0012-{NONCE}.safetensors")
    assert (part.version, part.rank, part.seq, part.nonce) == (7, 3, 12, NONCE)
    assert keys.parse_commit_key(f"commits/{V7}.json") == 7
    assert keys.parse_schema_key(f"schema/{'ab' * 32}.json") == "ab" * 32
    anchor = keys.parse_anchor_key(f"anchors/{V7}-{NONCE}.json")
    assert (anchor.version, anchor.nonce, anchor.file) == (7, NONCE, None)
    assert keys.parse_anchor_file_key(f"anchors/{V7}-{NONCE}/README.md").file == "README.md"


def test_listing_order_is_version_order() -> None:
    names = [keys.commit_key(version) for version in (1, 9, 10, 99, 100, 2**53 - 1)]
    assert names == sorted(names)


def test_every_attempt_gets_its_own_name() -> None:  # rule K5, field case F77
    nonces = {keys.new_nonce() for _ in range(100)}
    assert len(nonces) == 100
    assert len({keys.part_key(1, 0, 0, nonce) for nonce in nonces}) == 100
    assert len(keys.new_stream_id()) == 32
    assert keys.new_stream_id() != keys.new_stream_id()
