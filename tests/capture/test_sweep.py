"""The compiled passes give the bits of the plain ones: every dtype, odd lengths, odd places, odd values."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_delta.capture import crew, kernels, sweep
from torch_delta.capture.marks import Marks, _add_plainly

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ODD_MASTERS = (
    0x00000000, 0x80000000,  # zeros
    0x7F800000, 0xFF800000,  # infinities
    0x7F7FFFFF, 0xFF7FFFFF,  # the largest, which round to infinity
    0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0x7FBFFFFF,  # NaN of all kinds
    0x00000001, 0x807FFFFF, 0x00008000, 0x00018000, 0x00007FFF,  # denormals and their ties
    0x3F808000, 0x3F818000, 0x3F80FFFF, 0x3F807FFF, 0x3F808001,  # ties to even and their neighbours
)  # fmt: skip


@pytest.fixture(autouse=True)
def _compiled():
    pytest.importorskip("numba")
    for kernel in (*kernels.SWEEP.values(), kernels.SWEEP_MASTERS, kernels.GATE):
        assert kernel.compile() is not None


def expected(before, now):
    """Element by element, in Python."""
    pairs = list(zip(before.tolist(), now.tolist(), strict=True))
    changed = [(at, a, b) for at, (a, b) in enumerate(pairs) if a != b]
    return [list(column) for column in zip(*changed, strict=True)] or [[], [], []]


def check(found, before, now, truth):
    assert [column.tolist() for column in found] == truth
    assert torch.equal(before, now)
    assert [column.dtype for column in found] == [torch.int32, before.dtype, before.dtype]


@settings(deadline=None)
@given(
    width=st.sampled_from(sorted(INTEGERS)),
    size=st.integers(1, 300) | st.integers(2040, 2120) | st.integers(4090, 4110),
    offset=st.integers(0, 9),
    density=st.sampled_from([0.0, 0.01, 0.06, 0.13, 0.3, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_width_at_every_place(width, size, offset, density, seed):
    """Pieces that begin anywhere, even where words of 8 bytes are not aligned."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (size + offset) * width, dtype=np.uint8)
    before = torch.from_numpy(raw).view(INTEGERS[width])[offset:]
    now = before.clone()
    flips = torch.from_numpy(rng.random(size) < density)
    now[flips] ^= torch.from_numpy(rng.integers(0, 256, size * width, dtype=np.uint8)).view(INTEGERS[width])[flips]
    truth = expected(before, now)
    check(sweep.sweep(before, now), before, now, truth)


@settings(deadline=None)
@given(
    bits=st.lists(st.sampled_from(ODD_MASTERS) | st.integers(0, 2**32 - 1), min_size=1, max_size=80),
    repeat=st.sampled_from([1, 1, 1, 70]),
    offset=st.integers(0, 5),
    flips=st.lists(st.tuples(st.integers(0, 5599), st.integers(0, 65535)), max_size=9),
)
def test_masters_are_swept_as_torch_casts_them(bits, repeat, offset, flips):
    """NaN, infinities, denormals, ties, at any alignment: torch's own cast is the truth."""
    raw = np.array([0] * offset + bits * repeat, dtype=np.uint32)
    masters = torch.from_numpy(raw.view(np.int32)).view(torch.float32)[offset:]
    now = masters.clone().to(torch.bfloat16).view(torch.int16)
    before = torch.empty(now.numel() + offset, dtype=torch.int16)[offset:]
    before.copy_(now)
    for at, value in flips:
        before[at % now.numel()] = np.array(value, np.uint16).view(np.int16).item()
    truth = expected(before, now)
    found = sweep.sweep_masters(before, masters)
    if found is None:
        pytest.skip("this machine's cast keeps NaN payloads")
    check(found, before, now, truth)


@pytest.mark.parametrize("threads", [1, 3])
def test_pieces_on_threads_are_one_array(threads, monkeypatch):
    monkeypatch.setattr(crew, "num_threads", lambda: threads)
    monkeypatch.setattr(sweep, "PIECE", 5000)
    rng = np.random.default_rng(3)
    masters = torch.from_numpy(rng.standard_normal(23_457, dtype=np.float32))
    now = masters.to(torch.bfloat16).view(torch.int16)
    before = now.clone()
    before[torch.from_numpy(rng.random(now.numel()) < 0.02)] ^= 3
    truth = expected(before, now)
    check(sweep.sweep_masters(before.clone(), masters), now.clone(), now, truth)
    check(sweep.sweep(before, now), before, now, truth)


@pytest.mark.parametrize("share", [0.02, 0.5])
def test_room_is_kept_unless_much_of_it_was_filled(share, monkeypatch):
    """What one sweep found is in memory of its own: the next one, in the same room, leaves it as it is."""
    monkeypatch.setattr(crew, "num_threads", lambda: 1)
    rng = np.random.default_rng(5)
    before = torch.from_numpy(rng.integers(0, 1 << 15, sweep.PIECE + 77, dtype=np.int16))
    now = before.clone()
    now[torch.from_numpy(rng.random(now.numel()) < share)] ^= 3
    as_it_was = before.clone()
    found = sweep.sweep(before, now)
    first = [column.clone() for column in found]
    sweep.sweep(before, as_it_was + 1)
    assert all(map(torch.equal, found, first))
    room = sweep._room.of(2)
    sweep.sweep(as_it_was, now)
    assert all(one is other for one, other in zip(sweep._room.of(2), room, strict=True)) == (share < 1 / 8)


def test_plain_and_compiled_agree(monkeypatch):
    """What happens without numba is the same."""
    rng = np.random.default_rng(4)
    masters = torch.from_numpy(rng.integers(0, 2**32, 9999, dtype=np.uint32).view(np.int32)).view(torch.float32)
    now = masters.to(torch.bfloat16).view(torch.int16)
    before = now.clone()
    before[::7] += 1
    compiled = sweep.sweep_masters(before.clone(), masters), sweep.sweep(before.clone(), now)
    plain = SimpleNamespace(get=lambda _: None)
    monkeypatch.setattr(sweep, "SWEEP_MASTERS", plain)
    monkeypatch.setattr(sweep, "SWEEP", {2: plain})
    plain = sweep.sweep_masters(before.clone(), masters), sweep.sweep(before.clone(), now)
    for one, other in zip(compiled, plain, strict=True):
        assert (one is None) == (other is None)
        assert one is None or all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@given(steps=st.lists(st.sets(st.integers(0, 99), max_size=30), max_size=6))
def test_marks_let_every_element_through_once(steps):
    """F03: over several steps only the first old bits of an element count."""
    marks, bitmap, seen = Marks(100), np.zeros(13, np.uint8), set()
    for step in steps:
        index = torch.tensor(sorted(step), dtype=torch.int32)
        truth = [at for at, position in enumerate(sorted(step)) if position not in seen]
        assert marks.add(index).tolist() == truth
        assert _add_plainly(bitmap, index.numpy()).tolist() == truth
        seen |= step


def test_work_may_bring_work(monkeypatch):
    """Nested work on busy helpers ends, in order, and the first failure comes out after all have stopped."""
    monkeypatch.setattr(crew, "num_threads", lambda: 3)

    def outer(number):
        return crew.share(lambda inner: (number, inner), range(4))

    assert crew.share(outer, range(9)) == [[(number, inner) for inner in range(4)] for number in range(9)]

    done = []

    def fails(number):
        if number == 1:
            raise ValueError("the second")
        done.append(number)

    with pytest.raises(ValueError, match="the second"):
        crew.share(fails, range(50))
    assert len(done) < 50


@pytest.mark.parametrize("size", [1, crew.WORTH_A_HELPER // 3, crew.WORTH_A_HELPER])
@pytest.mark.parametrize("threads", [1, 3])
def test_work_set_aside(monkeypatch, threads, size):
    """All of it is done at `finish`; the first failure comes out there, and nothing is begun after it."""
    monkeypatch.setattr(crew, "num_threads", lambda: threads)
    done = []
    aside = crew.Aside(done.append)
    for number in range(200):
        aside.add(number, size)
    aside.finish()
    assert sorted(done) == list(range(200))

    done.clear()

    def fails(number):
        if number == 3:
            raise ValueError("the fourth")
        done.append(number)

    aside = crew.Aside(fails)

    for number in range(200):
        aside.add(number, size)
    with pytest.raises(ValueError, match="the fourth"):
        aside.finish()
    aside.stop()
    assert 3 not in done
    assert len(set(done)) == len(done) < 200


def test_only_enough_work_is_handed_over(monkeypatch):
    """Small items wait for the caller; a large one, or many small ones together, go to a helper while it goes on."""
    monkeypatch.setattr(crew, "num_threads", lambda: 2)
    caller = threading.get_ident()
    seen = []

    def work(item):
        seen.append((item, threading.get_ident() == caller, torch.is_grad_enabled()))
        if item == "last":
            helped.set()

    for sizes in ([crew.WORTH_A_HELPER], [crew.WORTH_A_HELPER // 4] * 4):
        seen.clear()
        helped = threading.Event()
        aside = crew.Aside(work)
        for number, size in enumerate(sizes):
            aside.add("last" if number == len(sizes) - 1 else number, size)
        assert helped.wait(60), "no helper took it"
        assert len(seen) == len(sizes)
        assert {(on_caller, has_gradients) for _, on_caller, has_gradients in seen} == {(False, False)}
        aside.finish()

    seen.clear()
    aside = crew.Aside(work)
    for number in range(9):
        aside.add(number, 1)
    assert not seen
    aside.finish()
    assert [(item, on_caller) for item, on_caller, _ in seen] == [(number, True) for number in range(9)]
