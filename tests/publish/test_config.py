"""A configuration that cannot work dies where it is built, and says which field."""

from __future__ import annotations

import dataclasses

import pytest

from torch_delta.config import PublishConfig, RetentionConfig


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"every": 0}, "every is 0"),
        ({"every": True}, "every is True"),
        ({"mode": "sideways"}, "mode is 'sideways'"),
        ({"max_in_flight": 0}, "max_in_flight is 0"),
        ({"receipt_timeout_s": 0.0}, "receipt_timeout_s is 0.0"),
        ({"commit_timeout_s": float("nan")}, "commit_timeout_s is nan"),
        ({"wait_timeout_s": 10.0}, "less than receipt_timeout_s"),
        ({"encodings": ("coo", "gzip")}, "encodings are"),
        ({"encodings": ("coo", "coo")}, "expected distinct"),
        ({"encodings": ()}, "at least one of"),
        ({"encodings": ("xor",)}, "at least one of coo, dense"),
        ({"zstd_level": 0}, "zstd_level is 0"),
        ({"num_encode_threads": 0}, "num_encode_threads is 0"),
        ({"part_bytes": 5}, "part_bytes is 5"),
        ({"num_put_attempts": 0}, "num_put_attempts is 0"),
        ({"retry_delay_s": -1.0}, "retry_delay_s is -1.0"),
        ({"anchor_every": 0}, "anchor_every is 0"),
        ({"anchor_file_bytes": 0}, "anchor_file_bytes is 0"),
        ({"max_reports": 0}, "max_reports is 0"),
        ({"on_restart": "hope"}, "on_restart is 'hope'"),
        ({"receiver_bytes_per_s": 0.0}, "receiver_bytes_per_s is 0.0"),
        ({"anchor_share": 0.0}, "anchor_share is 0.0"),
        ({"anchor_least_s": -1.0}, "anchor_least_s is -1.0"),
        ({"alive_s": -1}, "alive_s is -1"),
    ],
)
def test_a_bad_field_is_named(change, named):
    with pytest.raises(ValueError, match=named):
        PublishConfig(**change)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"keep_anchors": 1}, "keep_anchors is 1; expected at least 2"),
        ({"grace_s": float("nan")}, "grace_s is nan"),
        ({"claim_s": 0}, "claim_s is 0"),
        ({"budget_bytes": -1}, "budget_bytes is -1"),
    ],
)
def test_a_bad_field_of_retention_is_named(change, named):
    with pytest.raises(ValueError, match=named):
        RetentionConfig(**change)


def test_defaults_are_valid_and_frozen():
    config = PublishConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.every = 2
    assert config.usable_encodings == config.encodings


def test_absolute_only_takes_relative_encodings_away():
    assert PublishConfig(absolute_only=True).usable_encodings == ("coo", "dense")


def test_publishing_by_hand_is_none_not_zero():
    assert PublishConfig(every=None).every is None
