"""Which profile of `packed` a version is written in: as chosen, or by how fast this rank uploads."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from torch_delta.config import PublishConfig
from torch_delta.publish.pipeline import LinkSpeed, Uploader

MIB = 1 << 20


def wants_ranks(speed: float | None = None, **options: object) -> bool:
    uploader = Uploader(Mock(), Mock(), "0" * 32, Mock(), PublishConfig(**options))
    try:
        if speed is not None:
            uploader.link.add(MIB, MIB / speed)
        return uploader.wants_ranks
    finally:
        uploader.stop(wait=True)


@pytest.mark.parametrize(
    ("profile", "speed", "expected"),
    [
        ("small", None, True),
        ("small", 1e12, True),
        ("fast", None, False),
        ("fast", 1.0, False),
        ("auto", None, True),
        ("auto", 1.9e8, True),
        ("auto", 2.1e8, False),
    ],
)
def test_profiles(profile: str, speed: float | None, expected: bool) -> None:
    assert wants_ranks(speed, profile=profile) is expected


def test_the_threshold_is_an_option() -> None:
    assert wants_ranks(1e9, small_below_bytes_per_s=2e9)
    assert not wants_ranks(1e9, small_below_bytes_per_s=5e8)


def test_nothing_is_reduced_for_encodings_that_do_not_use_it() -> None:
    assert not wants_ranks(profile="small", encodings=("coo", "xor"))
    assert not wants_ranks(profile="small", absolute_only=True)


def test_speed_is_an_average_over_parts_that_are_large_enough_to_tell() -> None:
    link = LinkSpeed()
    link.add(MIB - 1, 1.0)
    link.add(MIB, 0.0)
    assert link.bytes_per_s is None
    link.add(4 * MIB, 1.0)
    assert link.bytes_per_s == 4 * MIB
    link.add(8 * MIB, 1.0)
    assert link.bytes_per_s == 5 * MIB


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"profile": "tiny"}, "profile is 'tiny'; expected one of auto, small, fast"),
        ({"small_below_bytes_per_s": 0}, "small_below_bytes_per_s is 0; expected more than 0"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PublishConfig(**options)


def test_what_readers_must_know() -> None:
    assert PublishConfig().required_features == ("packed",)
    assert PublishConfig(absolute_only=True).required_features == ()
    assert PublishConfig(encodings=("coo", "xor", "dense")).required_features == ()
