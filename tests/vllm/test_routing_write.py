"""Plans and writes on toy modules: merging, checks before anything is written, undo, digests, several ranks."""

from __future__ import annotations

import pickle
import tracemalloc

import numpy as np
import pytest
import torch

from tests.vllm.toys import Toy, bits_of, changed, dense_patch, make_patch, patch_of, random_bits, schema_of
from torch_delta import crashpoints
from torch_delta.errors import ApplyFailed, DigestMismatch, FormatError
from torch_delta.format.box import Box
from torch_delta.format.digest import ZERO, digest_words
from torch_delta.receive.patches import PatchSlice
from torch_delta.vllm.routing import Cancelled, LiveModel, check_summaries, jobs, kernels
from torch_delta.vllm.routing import write as writing
from torch_delta.vllm.routing.memory import Storage


def default(toy, name, w):
    toy.weight.data.copy_(w)


def transpose(toy, name, w):
    toy.weight.data.copy_(w.t())


def packed(toy, name, w):
    """Three tensors in one parameter, as qkv."""
    first, end = {"q": (0, 8), "k": (8, 12), "v": (12, 16)}[name]
    toy.weight.data[first:end].copy_(w)


def open_packed(seed=0):
    base = {
        name: random_bits((rows, 6), seed=seed + rows + at)
        for at, (name, rows) in enumerate({"q": 8, "k": 4, "v": 4}.items())
    }
    return open_live(Toy(packed, (16, 6)), base)


def open_live(toy, base, num_threads=2):
    toy.load_weights(base.items())
    schema = schema_of(base)
    live = LiveModel.probe(toy, schema, num_threads=num_threads)
    live.settle([live.reach], 0)
    return toy, live, schema, base


@pytest.fixture(params=["compiled", "numpy", "device"])
def path(request, monkeypatch):
    """The write with and without numba, and that of memory that is no host memory: the same bits, the same failures."""
    if request.param == "numpy":
        monkeypatch.setattr(jobs, "compiled_write", lambda index, bits: None)
    elif request.param == "device":
        make = Storage.__init__

        def elsewhere(self, name, tensor):
            make(self, name, tensor)
            self.host = None

        monkeypatch.setattr(Storage, "__init__", elsewhere)
    elif kernels.compiled_write(np.dtype("<u4"), np.dtype("<u2")) is None:
        pytest.skip("numba is not installed")
    return request.param


def digests(schema, state):
    """By the definition, in plain Python."""
    return {at: digest_words(bits_of(state[spec.name]).reshape(-1).tolist()) for at, spec in enumerate(schema.tensors)}


def test_versions_are_merged_and_the_last_write_wins(path) -> None:
    toy, live, schema, base = open_packed()
    states = [base]
    patches = []
    for version in range(1, 6):
        states.append({name: changed(tensor, 0.3, 10 * version + len(name)) for name, tensor in states[-1].items()})
        make = patch_of(version, schema, states[-2], states[-1]) if version != 3 else dense_patch(3, schema, states[-1])
        patches.append(make)
    plan = live.plan(patches)
    assert plan.version == 5
    check_summaries([plan.summary], before=digests(schema, base), after=digests(schema, states[-1]), names=str)
    live.write(plan)
    fresh = Toy(packed, (16, 6))
    fresh.load_weights(states[-1].items())
    np.testing.assert_array_equal(bits_of(toy.weight), bits_of(fresh.weight))
    assert live.digest() == digests(schema, states[-1])
    live.close()


@pytest.mark.parametrize("seed", range(20))
def test_merging_equals_writing_one_after_the_other(seed) -> None:
    generator = np.random.default_rng(seed)
    base = {"w": random_bits((12, 10), seed=seed)}
    toy, live, _schema, _ = open_live(Toy(transpose, (10, 12)), base)
    expected = bits_of(base["w"]).copy()
    patches = []
    for version in range(1, int(generator.integers(2, 6))):
        slices = []
        cut = int(generator.integers(0, 11))
        for first, end in ((0, cut), (cut, 10)):  # column boxes: their elements alternate in the flat order
            box = Box((0, first), (12, end - first))
            if generator.random() < 0.3:
                positions, count = None, box.numel
            else:
                positions = np.flatnonzero(generator.random(box.numel) < 0.3).astype(np.uint32)
                count = positions.size
            value = generator.integers(0, 1 << 16, count).astype(np.uint16)
            if count:
                slices.append(PatchSlice(box, positions, value))
                region = expected[:, first:end].copy()
                region.reshape(-1)[slice(None) if positions is None else positions] = value
                expected[:, first:end] = region
        patches.append(make_patch(version, {0: tuple(slices)} if slices else {}))
    live.write(live.plan(patches))
    np.testing.assert_array_equal(bits_of(toy.weight), expected.T)
    live.close()


def refused(slices):
    toy, live, _schema, _ = open_live(Toy(default, (4, 5)), {"w": random_bits((4, 5))})
    before = bits_of(toy.weight).copy()
    with pytest.raises(FormatError) as caught:
        live.plan([make_patch(1, {0: tuple(slices)})])
    np.testing.assert_array_equal(bits_of(toy.weight), before)
    live.close()
    return str(caught.value)


def sparse(positions, values=None, box=None, kind=np.uint32):
    values = np.zeros(len(positions), np.uint16) if values is None else values
    return PatchSlice(box or Box((0, 0), (4, 5)), np.array(positions, kind), values)


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ([sparse([3, 20])], "position 20 lies outside a box of 20 elements"),  # F65: on a GPU this kills the process
        ([sparse([-1, 3], kind=np.int64)], "position -1 lies outside"),
        ([sparse([4, 3])], "do not increase strictly"),
        ([sparse([3, 3])], "do not increase strictly"),
        ([sparse([3, 4], np.zeros(3, np.uint16))], "3 values for 2 positions"),
        ([sparse([3], np.zeros(1, np.uint32))], "values of uint32, BF16 has elements of uint16"),
        ([sparse([0], box=Box((2, 0), (4, 5)))], "outside the shape"),
        ([sparse([0], box=Box((0, 0), (3, 5))), sparse([0], box=Box((2, 0), (2, 5)))], "two boxes overlap"),
        ([PatchSlice(Box((0, 0), (4, 5)), None, np.zeros(19, np.uint16))], "19 values for 20 positions"),
    ],
)
def test_what_a_patch_cannot_mean_is_refused_before_anything_is_written(slices, message) -> None:
    assert message in refused(slices)


def big_live(num_threads=2):
    """Enough elements for several jobs of both kinds."""
    base = {"q": random_bits((700, 600), seed=1), "v": random_bits((700, 600), seed=2)}

    def loader(toy, name, w):
        toy.weight.data[{"q": 0, "v": 1}[name]].copy_(w)

    toy, live, schema, _ = open_live(Toy(loader, (2, 700, 600)), base, num_threads)
    middle = {name: changed(tensor, 0.5, 7) for name, tensor in base.items()}
    return toy, live, schema, base, middle


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_old_bits_that_are_not_those_of_the_plan_stop_the_write_and_everything_is_undone(
    path, kind, num_threads
) -> None:
    toy, live, schema, base, new = big_live(num_threads)
    patch = patch_of(1, schema, base, new) if kind == "sparse" else dense_patch(1, schema, new)
    plan = live.plan([patch])
    flat = toy.weight.data.view(torch.int16).view(-1)
    differs = np.flatnonzero(bits_of(base["v"]) != bits_of(new["v"]))[-1]
    flat[700 * 600 + int(differs)] ^= 3  # somebody else wrote
    before = bits_of(toy.weight).copy()
    with pytest.raises(ApplyFailed, match="not those the plan was made for") as caught:
        live.write(plan)
    assert caught.value.undone is True
    assert caught.value.tensor_index == schema.index("v")
    np.testing.assert_array_equal(bits_of(toy.weight), before)
    flat[700 * 600 + int(differs)] ^= 3
    live.write(plan)  # the same plan, once the cause is gone
    for name, at in (("q", 0), ("v", 1)):
        np.testing.assert_array_equal(bits_of(toy.weight)[at], bits_of(new[name]))
    live.close()


class Many(torch.nn.Module):
    """Many parameters with memory of their own, some of one element and of two widths."""

    SHAPES = tuple((1 + at % 3, 1 + at % 7) for at in range(40))

    def __init__(self):
        super().__init__()
        for at, shape in enumerate(self.SHAPES):
            dtype = torch.float32 if at % 8 == 5 else torch.bfloat16
            data = torch.zeros(shape, dtype=dtype)
            self.register_parameter(f"p{at:02d}", torch.nn.Parameter(data, requires_grad=False))

    def load_weights(self, weights):
        for name, w in weights:
            getattr(self, name).data.copy_(w)


@pytest.mark.parametrize("damaged", [0, 17, 29, 39])
def test_many_tensors_are_few_units_of_work_and_a_failure_names_the_right_one(path, damaged) -> None:
    toy = Many()
    base = {name: random_bits(tuple(p.shape), p.dtype, seed=at) for at, (name, p) in enumerate(toy.named_parameters())}
    _toy, live, schema, _ = open_live(toy, base)
    new = {name: changed(tensor, 1.0, 5) for name, tensor in base.items()}
    first = {name: tensor.flatten()[:1] for name, tensor in new.items()}
    patch = {
        schema.index(name): (PatchSlice(Box((0, 0), tuple(new[name].shape)), np.zeros(1, np.uint32), bits_of(one)),)
        for name, one in first.items()
    }
    plan = live.plan([make_patch(1, patch)])
    assert len(plan.jobs) == (0 if path == "device" else 2), "one per width of elements"
    memory = getattr(toy, f"p{damaged:02d}").data.view(torch.uint8)
    memory.view(-1)[0] ^= 1
    before = [bits_of(parameter).copy() for parameter in toy.parameters()]
    with pytest.raises(ApplyFailed, match=f"into p{damaged:02d}: live bits are not those") as caught:
        live.write(plan)
    assert caught.value.tensor_index == schema.index(f"p{damaged:02d}")
    for parameter, bits in zip(toy.parameters(), before, strict=True):
        np.testing.assert_array_equal(bits_of(parameter), bits)
    memory.view(-1)[0] ^= 1
    undo = live.write(plan)
    for name, parameter in toy.named_parameters():
        held, wanted = bits_of(parameter).reshape(-1), bits_of(base[name]).reshape(-1).copy()
        wanted[0] = bits_of(first[name])[0]
        np.testing.assert_array_equal(held, wanted)
    live.rollback(undo)
    assert live.digest() == digests(schema, base)
    live.close()


@pytest.mark.parametrize("nth", [1, 2, 4])
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_an_exception_in_the_middle_is_undone_bit_for_bit(path, kind, num_threads, nth) -> None:
    toy, live, schema, base, new = big_live(num_threads)
    patch = patch_of(1, schema, base, new) if kind == "sparse" else dense_patch(1, schema, new)
    plan = live.plan([patch])
    before = bits_of(toy.weight).copy()

    def fail():
        raise MemoryError("scripted")

    if path == "device":
        nth = min(nth, len(plan.targets))  # units of work are larger there
    with (
        crashpoints.armed("vllm.write_job", fail, nth=nth),
        pytest.raises(ApplyFailed, match="MemoryError: scripted; live weights are as before") as caught,
    ):
        live.write(plan)
    assert caught.value.undone is True
    np.testing.assert_array_equal(bits_of(toy.weight), before)
    live.rollback(live.write(plan))
    np.testing.assert_array_equal(bits_of(toy.weight), before)
    live.close()


def test_undoing_that_does_not_hold_says_that_memory_is_torn(monkeypatch) -> None:
    _toy, live, schema, base, new = big_live()
    undo = live.write(live.plan([patch_of(1, schema, base, new)]))
    monkeypatch.setattr(writing, "_restore", lambda job: False)
    with pytest.raises(ApplyFailed, match="does not hold its old bits") as caught:
        live.rollback(undo)
    assert caught.value.undone is False
    with pytest.raises(ValueError, match="taken back already"):
        live.rollback(undo)
    live.close()


def test_two_elements_in_one_place_are_noticed(path) -> None:
    """As a wrong route would have it: what is looked at first differs by path, and none of them leaves anything."""
    toy, live, schema, base = open_packed()
    plan = live.plan([patch_of(1, schema, base, {n: changed(t, 0.5, 3) for n, t in base.items()})])
    (target,) = plan.targets
    places, old, new = target.device or (target.index, target.old, target.new)
    places[1], old[1] = int(places[0]), int(old[0])
    new[0], new[1] = 1, 2
    before = bits_of(toy.weight).copy()
    finds = "live bits are not those" if path == "compiled" else "bits read back differ"
    with pytest.raises(ApplyFailed, match=finds) as caught:
        live.write(plan)
    assert caught.value.undone is True
    np.testing.assert_array_equal(bits_of(toy.weight), before)
    live.close()


def test_a_plan_is_for_one_state_only() -> None:
    _toy, live, schema, base, new = big_live()
    plan = live.plan([patch_of(1, schema, base, new)])
    undo = live.write(plan)
    with pytest.raises(ApplyFailed, match="made for another state") as caught:
        live.write(plan)
    assert caught.value.undone is True
    live.rollback(undo)
    live.forget()
    with pytest.raises(ApplyFailed, match="made for another state"):
        live.write(plan)
    live.close()


def test_positions_beyond_31_bits() -> None:
    """Memory is promised, not used: only the pages that are written."""
    numel = (1 << 32) + 4096
    base = {"w": torch.empty(numel, dtype=torch.uint8)}
    toy = Toy(default, (1,), torch.uint8)
    toy.weight = torch.nn.Parameter(torch.from_numpy(np.zeros(numel, np.uint8)), requires_grad=False)
    schema = schema_of(base)
    live = LiveModel.probe(toy, schema, num_threads=1)
    live.settle([live.reach], 0)
    positions = np.array([5, (1 << 31) - 1, 1 << 31, (1 << 31) + 77, (1 << 32) - 1, 1 << 32, numel - 1], np.uint64)
    values = np.arange(1, 8, dtype=np.uint8)
    plan = live.plan([make_patch(1, {0: (PatchSlice(Box((0,), (numel,)), positions, values),)})])
    undo = live.write(plan)
    assert [int(toy.weight[int(at)]) for at in positions] == values.tolist()
    assert plan.summary.deltas[0] == sum(
        (digest_words([value], int(at)) for at, value in zip(positions, values.tolist(), strict=True)), ZERO
    )
    live.rollback(undo)
    assert [int(toy.weight[int(at)]) for at in positions] == [0] * 7
    live.close()


def test_memory_in_the_pause_is_that_of_the_plan() -> None:
    _toy, live, schema, base, new = big_live()
    plan = live.plan([patch_of(1, schema, base, new)])
    assert plan.nbytes == plan.num_elements * (4 + 2 + 2)
    live.rollback(live.write(plan))  # what is made once is made
    tracemalloc.start()
    undo = live.write(plan)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 10, f"{peak} bytes for {plan.num_elements} elements"
    live.rollback(undo)
    live.close()


def test_summaries_of_all_ranks_prove_old_and_new_bits_before_anything_is_written() -> None:
    toy, live, schema, base = open_packed()
    new = {name: changed(tensor, 0.5, 3) for name, tensor in base.items()}
    names = lambda at: schema.tensors[at].name  # noqa: E731
    before, after = digests(schema, base), digests(schema, new)
    good = live.plan([patch_of(1, schema, base, new)]).summary
    check_summaries([pickle.loads(pickle.dumps(good))], before=before, after=after, names=names)

    toy.weight.data.view(torch.int16)[0] ^= 1  # live memory is not version 0 any more, in row 0 of q
    bad = live.plan([patch_of(1, schema, base, new)]).summary
    with pytest.raises(DigestMismatch, match="live 'q' would not become version 1"):
        check_summaries([bad], before=before, after=after, names=names)
    with pytest.raises(ApplyFailed, match=r"sets .* elements of '.', the ranks would write"):  # F64: twice is too many
        check_summaries([good, good], before=None, after=None, names=names)
    other = live.plan([make_patch(1, {})]).summary
    with pytest.raises(ApplyFailed, match="planned different changes"):
        check_summaries([good, other], before=None, after=None, names=names)
    live.close()


def test_an_empty_version_is_a_plan_that_writes_nothing() -> None:
    toy, live, _schema, _base = open_packed()
    before = bits_of(toy.weight).copy()
    plan = live.plan([make_patch(1, {})])
    assert (plan.num_elements, plan.nbytes, plan.unrouted) == (0, 0, frozenset())
    live.rollback(live.write(plan))
    np.testing.assert_array_equal(bits_of(toy.weight), before)
    with pytest.raises(ValueError, match="at least one patch"):
        live.plan([])
    live.close()


def test_touched_tensors_without_a_route_are_named() -> None:
    toy, live, schema, base = open_packed()
    live.withdraw({schema.index("k"): "the engine transforms it"})
    new = {name: changed(tensor, 0.5, 3) for name, tensor in base.items()}
    plan = live.plan([patch_of(1, schema, base, new)])
    assert plan.unrouted == {schema.index("k")}
    assert schema.index("k") not in plan.summary.sent
    live.write(plan)
    np.testing.assert_array_equal(bits_of(toy.weight)[8:12], bits_of(base["k"]))
    np.testing.assert_array_equal(bits_of(toy.weight)[12:], bits_of(new["v"]))
    live.close()


def test_work_can_be_cancelled_and_a_digest_does_not_straddle_a_write() -> None:
    _toy, live, schema, base, new = big_live()
    with pytest.raises(Cancelled):
        live.plan([patch_of(1, schema, base, new)], cancelled=lambda: True)
    assert live.digest(cancelled=lambda: True) is None
    assert live.prove(lambda tensor, box: pytest.fail("nothing is read"), cancelled=lambda: True) == {}
    plan = live.plan([patch_of(1, schema, base, new)])
    asked = []

    def write_meanwhile():
        if not asked:
            live.write(plan)
        asked.append(1)
        return False

    assert live.digest(cancelled=write_meanwhile) is None
    assert live.digest([0]) is not None
    live.close()


def test_the_proof_withdraws_what_the_engine_does_not_hold_as_the_checkpoint_does() -> None:
    toy, live, schema, base = open_packed()

    def read(tensor, box):
        where = tuple(slice(at, at + extent) for at, extent in zip(box.offset, box.shape, strict=True))
        return bits_of(base[schema.tensors[tensor].name])[where]

    assert live.prove(read) == {}
    toy.weight.data.view(torch.int16)[9, 2] ^= 1
    failed = live.prove(read)
    assert list(failed) == [schema.index("k")]
    assert "1 of 24 elements in weight do not hold the checkpoint's bits" in failed[schema.index("k")]
    assert live.unrouted == failed
    assert schema.index("k") not in live.routed
    live.close()


# -- several ranks, without processes: each toy is the shard of one rank ---------------------------------------------


class Shard(torch.nn.Module):
    """One rank of a model with a column-parallel, a row-parallel, a grouped (KV heads) and a replicated weight."""

    def __init__(self, rank, world_size, broken=None):
        super().__init__()
        self.rank, self.world_size, self.broken = rank, world_size, broken
        for name, shape in {
            "column": (12 // world_size, 6),
            "row": (6, 12 // world_size),
            "kv": (max(2, 4 // world_size), 6),
            "norm": (6,),
        }.items():
            data = torch.zeros(shape, dtype=torch.bfloat16)
            self.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))

    def load_weights(self, weights):
        n = 12 // self.world_size
        kv = self.rank * 2 // self.world_size  # two heads of two rows
        for name, w in weights:
            if name == "column":
                self.column.data.copy_(w.narrow(0, (0 if self.broken == "column" else self.rank) * n, n))
            elif name == "row":
                self.row.data.copy_(w.narrow(1, self.rank * n, n))
            elif name == "kv":
                first = 1 if self.broken == "kv" and self.rank == 1 else 2 * kv
                self.kv.data.copy_(w.narrow(0, first, self.kv.shape[0]))
            else:
                if self.broken == "norm" and self.rank == 1:
                    w.zero_()
                self.norm.data.copy_(w)


BASE = {"column": (12, 6), "kv": (4, 6), "norm": (6,), "row": (6, 12)}


def open_ranks(world_size, broken=None):
    base = {name: random_bits(shape, seed=at) for at, (name, shape) in enumerate(BASE.items())}
    schema = schema_of(base)
    shards = [Shard(rank, world_size, broken) for rank in range(world_size)]
    lives = []
    for shard in shards:
        shard.load_weights((name, tensor.clone()) for name, tensor in base.items())
        lives.append(LiveModel.probe(shard, schema, num_threads=1))
    reaches = [pickle.loads(pickle.dumps(live.reach)) for live in lives]
    for rank, live in enumerate(lives):
        live.settle(reaches, rank)
    return base, schema, shards, lives


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_write_their_shares_and_count_replicas_once(world_size) -> None:
    base, schema, shards, lives = open_ranks(world_size)
    assert all(live.routed == {0, 1, 2, 3} for live in lives)
    new = {name: changed(tensor, 0.5, 3) for name, tensor in base.items()}
    plans = [live.plan([patch_of(1, schema, base, new)]) for live in lives]
    names = lambda at: schema.tensors[at].name  # noqa: E731
    summaries = [plan.summary for plan in plans]
    check_summaries(summaries, before=digests(schema, base), after=digests(schema, new), names=names)
    for live, plan in zip(lives, plans, strict=True):
        live.write(plan)
    for rank, shard in enumerate(shards):
        fresh = Shard(rank, world_size)
        fresh.load_weights((name, tensor.clone()) for name, tensor in new.items())
        for name, parameter in shard.named_parameters():
            np.testing.assert_array_equal(bits_of(parameter), bits_of(dict(fresh.named_parameters())[name]))
    shares = [live.digest() for live in lives]
    total = {at: sum((share[at] for share in shares), ZERO) for at in range(4)}
    assert total == digests(schema, new)
    norm = schema.index("norm")
    assert [live.digest([norm])[norm] == ZERO for live in lives] == [False] + [True] * (world_size - 1)
    for live in lives:
        live.close()


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("column", "only 36 of its 72 elements land anywhere"),
        ("norm", "changes the checkpoint tensor itself (aten.zero_.default) (rank 1)"),
    ],
)
def test_what_is_wrong_on_one_rank_is_unrouted_on_all(broken, reason) -> None:
    _, schema, _, lives = open_ranks(2, broken)
    for live in lives:
        assert live.routed == set(range(4)) - {schema.index(broken)}
        assert reason in live.unrouted[schema.index(broken)]
        live.close()


def test_parts_that_overlap_without_being_the_same_are_not_routed() -> None:
    _, schema, _, lives = open_ranks(4, "kv")
    for live in lives:
        assert live.unrouted == {schema.index("kv"): "ranks hold parts of it that overlap without being the same"}
        live.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_on_a_gpu(kind) -> None:
    base = {"q": random_bits((700, 600), seed=1), "v": random_bits((700, 600), seed=2)}
    new = {name: changed(tensor, 0.3, 7) for name, tensor in base.items()}

    def loader(toy, name, w):
        toy.weight.data[{"q": 0, "v": 1}[name]].copy_(w.t() if name == "v" else w)

    base["v"], new["v"] = base["v"].t().contiguous(), new["v"].t().contiguous()
    toy = Toy(loader, (2, 700, 600)).cuda()
    toy, live, schema, _ = open_live(toy, base)
    assert live.routed == {0, 1}
    patch = patch_of(1, schema, base, new) if kind == "sparse" else dense_patch(1, schema, new)
    plan = live.plan([patch])
    before = bits_of(toy.weight).copy()
    undo = live.write(plan)
    fresh = Toy(loader, (2, 700, 600))
    fresh.load_weights(new.items())
    np.testing.assert_array_equal(bits_of(toy.weight), bits_of(fresh.weight))
    live.rollback(undo)
    np.testing.assert_array_equal(bits_of(toy.weight), before)
    toy.weight.data.view(torch.int16)[1, 0, :50] ^= 1
    torn = bits_of(toy.weight).copy()
    with pytest.raises(ApplyFailed, match="not those the plan was made for"):
        live.write(plan)
    np.testing.assert_array_equal(bits_of(toy.weight), torn)
    live.close()
