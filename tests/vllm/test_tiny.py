"""The vLLM tests' own tools: versions are what the oracle says, and fresh engines tell versions apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.vllm.engines import differing
from tests.vllm.tiny import ALWAYS_TIED, FAMILIES, NEVER_TIED, Versions, read_checkpoint, to_bits, write_checkpoint
from torch_delta import Follower, LocalCheckpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def follow(versions: Versions, folder: Path, until: int) -> dict[str, np.ndarray]:
    checkpoint = LocalCheckpoint(folder, base=versions.base, fsync=False)
    with Follower(versions.url) as follower:
        list(follower.apply_to(checkpoint, until=until, timeout_s=60.0))
    checkpoint.close()
    return read_checkpoint(folder)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_version_is_published_as_the_oracle_has_it(family: str, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", family, num_files=2)
    with Versions(base, tmp_path / "stream") as versions:
        for change in (versions.sparse, versions.dense, versions.special):
            version = change(seed=versions.version)
            got = follow(versions, tmp_path / "host", version)
            assert got.keys() == versions.bits(version).keys()
            for name, bits in versions.bits(version).items():
                np.testing.assert_array_equal(got[name], bits, err_msg=name)
                assert (bits != versions.bits(version - 1)[name]).any(), f"{name} does not change"
        assert versions.nothing() == 4
        written, _ = read_checkpoint(versions.write(2, tmp_path / "at-2", num_files=3))
        assert all(np.array_equal(written[name], bits) for name, bits in versions.bits(2).items())


def test_special_values_are_what_they_are_called(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", "qwen3")
    with Versions(base, tmp_path / "stream") as versions:
        versions.special(seed=0)
        for name, bits in versions.bits().items():
            words = bits.astype(np.uint32) << 16
            values = words.view(np.float32)
            assert np.isnan(values).sum() >= 4, name
            assert np.isinf(values).sum() >= 2, name
            assert (bits == 0x8000).any(), name
            assert (bits == 0x0000).any(), name


def test_rounding_to_bf16_is_to_nearest_even() -> None:
    values = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7FFFFFFF, 0x80000000, 0x7F7FFFFF], np.uint32)
    wanted = [0x3F80, 0x3F82, 0x3F81, 0x7FFF, 0x8000, 0x7F80]
    assert to_bits(values.view(np.float32), "BF16").tolist() == wanted


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - NEVER_TIED))
def test_a_tied_checkpoint_has_no_head(family: str, tmp_path: Path) -> None:
    has_head = {
        tied: "lm_head.weight" in read_checkpoint(write_checkpoint(tmp_path / str(tied), family, tied=tied))[0]
        for tied in (True, False)
    }
    assert has_head == {True: False, False: family not in ALWAYS_TIED}


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_fresh_engines_tell_two_versions_apart(
    family: str, checkpoint: Callable[..., Path], fresh: Callable, tmp_path: Path
) -> None:
    base = checkpoint(family)
    with Versions(base, tmp_path / "stream") as versions:
        versions.sparse(seed=1, fraction=0.05)
        after = versions.write(1, tmp_path / "at-1")
    old, new, again = (fresh(folder, delta=False) for folder in (base, after, versions.write(0, tmp_path / "at-0")))
    assert differing(old.parameters, again.parameters) == []
    assert old.greedy == again.greedy
    num_weights = sum(bits.size > 4 for bits in old.parameters.values())
    assert len(differing(old.parameters, new.parameters)) >= num_weights // 2
    if old.greedy is not None:
        assert old.greedy != new.greedy
        assert max(len(set(tokens)) for tokens in old.greedy) > 4  # no loop that any weights would give
