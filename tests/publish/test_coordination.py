"""Values of any size, deadlines that name phase and peer, and agreement: all ranks raise, or none."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from torch_delta.errors import BaseMismatch, DeadlineExceeded, PublishFailed, TorchDeltaError
from torch_delta.publish.coordination import Team, pack_error, unpack_error
from torch_delta.publish.keyvalue import (
    LocalKeyValue,
    PrefixedKeyValue,
    TorchKeyValue,
    await_value,
    delete_blob,
    get_blob,
    put_blob,
)


@pytest.fixture(params=["local", "tcp"])
def kv(request):
    if request.param == "local":
        return LocalKeyValue()
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    return TorchKeyValue(server, "torch_delta/test")


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 1, 9 << 20])
def test_blobs_of_any_size(kv, size):
    # 9 MiB: TCPStore closes the connection on a single value of more than 8
    data = bytes(i % 251 for i in range(1000)) * (size // 1000 + 1)
    data = data[:size]
    assert get_blob(kv, "a/b") is None
    put_blob(kv, "a/b", data)
    assert get_blob(kv, "a/b") == data
    delete_blob(kv, "a/b", len(data))
    assert get_blob(kv, "a/b") is None
    assert kv.get("a/b.1") is None


def test_waiting_ends_with_phase_and_peer(kv):
    with pytest.raises(DeadlineExceeded, match=r"receipt: nothing heard from rank 3 within 0\.01 s") as caught:
        await_value(kv, "never", timeout_s=0.01, phase="receipt", peer="rank 3")
    assert (caught.value.phase, caught.value.peer, caught.value.timeout_s) == ("receipt", "rank 3", 0.01)


def test_a_waiting_thread_does_not_block_others(kv):
    # torch's own blocking get would hold the connection that the training thread needs
    heard = []
    waiter = threading.Thread(
        target=lambda: heard.append(await_value(kv, "late", timeout_s=30, phase="p", peer="q")), daemon=True
    )
    waiter.start()
    for number in range(100):
        kv.set("other", b"%d" % number)
    assert kv.get("other") == b"99"
    put_blob(kv, "late", b"here")
    waiter.join(30)
    assert heard == [b"here"]


def test_a_value_of_the_same_process_ends_the_pause_that_waits_for_it():
    kv = LocalKeyValue()
    part = PrefixedKeyValue(kv, "p/")
    paused = threading.Event()
    ended = []

    def wait() -> None:
        paused.set()
        while part.get("key") is None:
            part.pause("key", waited_s=0.0, left_s=30.0)
        ended.append(part.get("key"))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert paused.wait(30)
    kv.set("key", b"of another part")
    kv.set("p/key", b"here")
    thread.join(30)
    assert ended == [b"here"]
    part.pause("key", waited_s=0.0, left_s=3600.0)  # set already: nothing to wait for


def test_a_server_that_is_gone_is_an_error_of_ours():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=1))
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=1))
    kv = TorchKeyValue(client, "x")
    kv.set("a", b"1")
    del server
    with pytest.raises(DeadlineExceeded, match="key-value store does not answer") as caught:
        kv.get("a")
    assert caught.value.peer == "server"


def together(kv, world, local, decide=b"".join, *, absent=(), timeout_s=5.0):
    """`agree` on `world` threads; results or errors by rank."""
    results = {}

    def run(rank):
        try:
            results[rank] = Team(rank, world, kv).agree("test", lambda: local(rank), decide, timeout_s=timeout_s)
        except TorchDeltaError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world) if rank not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_agreement_reaches_every_rank(kv):
    assert together(kv, 3, lambda rank: b"%d" % rank) == {0: b"012", 1: b"012", 2: b"012"}


def test_one_rank_failing_raises_its_error_on_all(kv):
    def local(rank):
        if rank == 1:
            raise BaseMismatch("wrong base", tensors=["a", "b"])
        if rank == 2:
            raise KeyError("oops")
        return b""

    results = together(kv, 3, local)
    assert [type(results[rank]) for rank in range(3)] == [BaseMismatch] * 3
    for error in results.values():
        assert error.failures == {1: "wrong base", 2: "KeyError: 'oops'"}
        assert error.tensors == ["a", "b"]
        assert "test: rank 1: wrong base (and 1 more of 2 failing ranks)" in str(error)
    assert isinstance(results[1].__cause__, BaseMismatch)


def test_the_deciding_rank_failing_raises_on_all(kv):
    def decide(payloads):
        raise BaseMismatch(f"{len(payloads)} differ")

    results = together(kv, 2, lambda _: b"", decide)
    assert [str(results[rank]) for rank in range(2)] == ["2 differ", "2 differ"]


def test_a_rank_that_never_answers_is_named_to_the_others(kv):
    # F32: every wait has a deadline and names the peer and the phase
    results = together(kv, 3, lambda _: b"", absent={1}, timeout_s=0.2)
    for rank in (0, 2):
        assert isinstance(results[rank], DeadlineExceeded)
        assert set(results[rank].failures) == {1}
        assert results[rank].peer == "rank 1"


def test_errors_keep_class_message_and_facts_across_ranks():
    error = PublishFailed("no", version=3, failures={0: "a", 7: "b"}, ignored=object())
    copy = unpack_error(pack_error(error))
    assert type(copy) is PublishFailed
    assert (copy.message, copy.version, copy.failures) == ("no", 3, {0: "a", 7: "b"})
    assert not hasattr(copy, "ignored")


def test_an_error_is_bounded():
    assert len(pack_error(TorchDeltaError("x" * 10_000_000))) < 10_000
