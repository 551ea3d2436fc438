"""The probe on toy modules: what is routed, what is not and why, and that it leaves the model as it was."""

from __future__ import annotations

import contextlib
import re

import numpy as np
import pytest
import torch

from tests.vllm.toys import Toy, bits_of, changed, patch_of, random_bits, schema_of
from torch_delta.format.dtypes import ITEMSIZE
from torch_delta.vllm.routing import LiveModel
from torch_delta.vllm.routing.dtypes import TORCH_DTYPES


def default(toy, name, w):
    toy.weight.data.copy_(w)


def transpose(toy, name, w):
    toy.weight.data.copy_(w.t())


def transpose_then_contiguous(toy, name, w):
    toy.weight.data.copy_(w.t().contiguous().view(6, 8))


def clone(toy, name, w):
    toy.weight.data.copy_(w.clone())


def to_device(toy, name, w):
    toy.weight.data.copy_(w.to("cpu").reshape(8, 6))


def reversed_halves(toy, name, w):
    toy.weight.data[:4].copy_(w[4:])
    toy.weight.data[4:].copy_(w[:4])


def interleaved(toy, name, w):
    toy.weight.data[:4].copy_(w[::2])
    toy.weight.data[4:].copy_(w[1::2])


def interleaved_columns(toy, name, w):
    toy.weight.data[:, :3].copy_(w[:, ::2])
    toy.weight.data[:, 3:].copy_(w[:, 1::2])


def heads(toy, name, w):
    toy.weight.data.copy_(w.view(2, 4, 6).transpose(0, 1).reshape(8, 6))


def twice_the_same(toy, name, w):
    toy.weight.data.copy_(w)
    toy.weight.data.copy_(w)


def zero_first(toy, name, w):
    toy.weight.data.zero_()
    toy.weight.data.copy_(w)


def by_assignment(toy, name, w):
    for row in range(8):
        toy.weight.data[row] = w[row]


def as_integers(toy, name, w):
    toy.weight.data.view(torch.int16).copy_(w.view(torch.int16))


def padded(toy, name, w):
    toy.weight[:8].data.copy_(w)
    toy.weight[8:].data.fill_(0)


def padded_columns(toy, name, w):
    toy.weight.data[:, :6].copy_(w)
    toy.weight.data[:, 6:].fill_(0)


ROUTED = {
    "default": (default, (8, 6), (8, 6)),
    "transpose": (transpose, (6, 8), (8, 6)),
    "transpose_then_contiguous": (transpose_then_contiguous, (6, 8), (8, 6)),
    "clone": (clone, (8, 6), (8, 6)),
    "to_device": (to_device, (8, 6), (48,)),
    "reversed_halves": (reversed_halves, (8, 6), (8, 6)),
    "interleaved": (interleaved, (8, 6), (8, 6)),
    "interleaved_columns": (interleaved_columns, (8, 6), (8, 6)),
    "heads": (heads, (8, 6), (8, 6)),
    "twice_the_same": (twice_the_same, (8, 6), (8, 6)),
    "zero_first": (zero_first, (8, 6), (8, 6)),
    "by_assignment": (by_assignment, (8, 6), (8, 6)),
    "as_integers": (as_integers, (8, 6), (8, 6)),
    "padded": (padded, (10, 6), (8, 6)),
    "padded_columns": (padded_columns, (8, 9), (8, 6)),
    "scalar": (default, (), ()),
    "one_element": (default, (1,), (1,)),
    "empty": (default, (0, 6), (0, 6)),
}


def open_live(toy, tensors, aliases=()):
    schema = schema_of(tensors, aliases)
    live = LiveModel.probe(toy, schema, num_threads=2)
    live.settle([live.reach], 0)
    return live, schema


def reader(schema, tensors):
    def read(tensor, box):
        where = tuple(slice(at, at + extent) for at, extent in zip(box.offset, box.shape, strict=True))
        return bits_of(tensors[schema.tensors[tensor].name])[where]

    return read


DTYPES = (torch.bfloat16, torch.float32, torch.uint8, torch.float64)
CASES = [(case, dtype) for case in ROUTED for dtype in DTYPES if case != "as_integers" or dtype == torch.bfloat16]


@pytest.mark.parametrize(("case", "dtype"), CASES, ids=str)
def test_an_affine_loader_is_routed_and_updates_are_those_of_a_fresh_load(case, dtype) -> None:
    loader, live_shape, shape = ROUTED[case]
    base = {"w": random_bits(shape, dtype)}
    toy = Toy(loader, live_shape, dtype)
    toy.load_weights(base.items())
    before = bits_of(toy.weight).copy()
    live, schema = open_live(toy, base)
    assert (live.routed, live.unrouted, live.ignored) == ({0}, {}, {})
    np.testing.assert_array_equal(bits_of(toy.weight), before)  # the probe wrote nothing
    assert live.prove(reader(schema, base)) == {}

    new = {"w": changed(base["w"], 0.4, 1)}
    live.write(live.plan([patch_of(1, schema, base, new)])) if base["w"].numel() else None
    fresh = Toy(loader, live_shape, dtype)
    fresh.load_weights(new.items())
    np.testing.assert_array_equal(bits_of(toy.weight), bits_of(fresh.weight))
    live.close()


def scale(toy, name, w):
    toy.weight.data.copy_(w * 2)


def through_float(toy, name, w):
    toy.weight.data.copy_(w.float())


def half_of_it(toy, name, w):
    toy.weight.data[:4].copy_(w[:4])


def to_two_places(toy, name, w):
    toy.weight.data.copy_(w)
    toy.other.data.copy_(w)


def broadcast(toy, name, w):
    toy.weight.data.copy_(w[0])


def composed(toy, name, w):
    toy.weight.data.copy_(w)
    toy.weight.data.copy_(-torch.exp(toy.weight.data))


def zeroed_afterwards(toy, name, w):
    toy.weight.data.copy_(w)
    toy.weight.data.zero_()


def column_zeroed_afterwards(toy, name, w):
    toy.weight.data.copy_(w)
    toy.weight.data[:, 2].zero_()


def mutates_the_source(toy, name, w):
    w.zero_()
    toy.weight.data.copy_(w)


def mutates_a_copy(toy, name, w):
    w = w.clone()
    w[0].zero_()
    toy.weight.data.copy_(w)


def concatenated(toy, name, w):
    toy.weight.data.copy_(torch.cat([w[4:], w[:4]]))


def permuted_by_index(toy, name, w):
    toy.weight.data.copy_(w[torch.tensor([1, 0, 3, 2, 5, 4, 7, 6])])


def index_put(toy, name, w):
    toy.weight.data[torch.arange(8)] = w


def in_place_arithmetic(toy, name, w):
    toy.weight.data.add_(w)


def out_argument(toy, name, w):
    torch.add(w, 1, out=toy.weight.data)


def into_a_buffer_first(toy, name, w):
    buffer = torch.empty(8, 6, dtype=w.dtype)
    buffer.copy_(w)
    toy.weight.data.copy_(buffer)


def exchanges_the_parameter(toy, name, w):
    toy.weight = torch.nn.Parameter(w.t(), requires_grad=False)


def exchanges_the_data(toy, name, w):
    toy.weight.data = w.t()


def exchanges_for_a_computed_one(toy, name, w):
    toy.weight.data = w * 2


def looks_at_values(toy, name, w):
    if w.float().sum().item() > 0:
        toy.weight.data.copy_(w)


def into_a_plain_tensor(toy, name, w):
    toy.plain.copy_(w)


def reads_only(toy, name, w):
    w.float().abs()


def sliced_across_rows(toy, name, w):
    toy.weight.data.reshape(-1)[:40].copy_(w.reshape(-1)[3:43])
    toy.weight.data.reshape(-1)[40:43].copy_(w.reshape(-1)[:3])
    toy.weight.data.reshape(-1)[43:].copy_(w.reshape(-1)[43:])


UNROUTED = {
    "scale": (scale, r"computes aten\.mul"),
    "through_float": (through_float, r"converts it from torch.bfloat16 to torch.float32"),
    "half_of_it": (half_of_it, r"only 24 of its 48 elements land"),
    "to_two_places": (to_two_places, r"lands in several places"),
    "broadcast": (broadcast, r"lands in several places"),
    "composed": (composed, r"writes over it afterwards \(aten\.copy_"),
    "zeroed_afterwards": (zeroed_afterwards, r"writes over it afterwards \(aten\.zero_"),
    "column_zeroed_afterwards": (column_zeroed_afterwards, r"writes over it afterwards \(aten\.zero_"),
    "mutates_the_source": (mutates_the_source, r"changes the checkpoint tensor itself \(aten\.zero_"),
    "mutates_a_copy": (mutates_a_copy, r"changes the checkpoint tensor itself \(aten\.zero_"),
    "concatenated": (concatenated, r"computes aten\.cat"),
    "permuted_by_index": (permuted_by_index, r"computes aten\.index"),
    "index_put": (index_put, r"aten\.index_put_"),
    "in_place_arithmetic": (in_place_arithmetic, r"aten\.add_"),
    "out_argument": (out_argument, r"aten\.add"),
    "into_a_buffer_first": (into_a_buffer_first, r"collects it in a buffer"),
    "exchanges_the_parameter": (exchanges_the_parameter, r"exchanges the parameter weight"),
    "exchanges_the_data": (exchanges_the_data, r"stand-in.*incompatible tensor type"),
    "exchanges_for_a_computed_one": (exchanges_for_a_computed_one, r"stand-in.*incompatible tensor type"),
    "looks_at_values": (looks_at_values, r"does not work on a stand-in"),
    "into_a_plain_tensor": (into_a_plain_tensor, r"memory that is no parameter or buffer"),
    "reads_only": (reads_only, r"reads it and stores it nowhere"),
    "sliced_across_rows": (sliced_across_rows, r"in the middle of rows"),
}


@pytest.mark.parametrize("case", UNROUTED)
def test_anything_else_is_left_to_the_reload_path_with_the_reason(case) -> None:
    loader, reason = UNROUTED[case]
    toy = Toy(loader, (8, 6))
    plain = torch.ones(8, 6, dtype=torch.bfloat16)
    if loader is to_two_places:
        toy.other = torch.nn.Parameter(torch.zeros(8, 6, dtype=torch.bfloat16), requires_grad=False)
    if loader is into_a_plain_tensor:
        toy.plain = plain
    weight, data = toy.weight, toy.weight.data_ptr()
    toy.weight.data.copy_(random_bits((8, 6), seed=5))
    before = bits_of(toy.weight).copy()
    live, schema = open_live(toy, {"w": torch.zeros(8, 6, dtype=torch.bfloat16)})
    assert live.routed == frozenset()
    assert re.search(reason, live.unrouted[schema.index("w")]), live.unrouted
    assert toy.weight is weight
    assert toy.weight.data_ptr() == data
    np.testing.assert_array_equal(bits_of(toy.weight), before)
    assert bool((plain == 1).all())
    live.close()


def test_a_weight_that_the_engine_keeps_in_another_shape_is_left_to_the_reload_path() -> None:
    """F73: experts in blocks of the hardware's, which the loader does not fit into any more once it has run."""

    def loader(toy, name, w):
        dict(toy.named_parameters())[name].data.copy_(w)

    toy = Toy(loader, (8, 6))
    toy.norm = torch.nn.LayerNorm(6, bias=False, dtype=torch.bfloat16)
    base = {"weight": random_bits((8, 6), seed=1), "norm.weight": random_bits((6,), seed=2)}
    toy.load_weights(base.items())
    toy.weight.data = toy.weight.data.view(2, 4, 3, 2).permute(0, 2, 1, 3).contiguous()
    before = bits_of(toy.weight).copy()
    schema = schema_of(base)
    live = LiveModel.probe(toy, schema)
    live.settle([live.reach], 0)
    assert "does not work on a stand-in" in live.unrouted[schema.index("weight")]
    np.testing.assert_array_equal(bits_of(toy.weight), before)
    live.close()


def test_one_tensor_that_cannot_be_probed_does_not_spoil_the_others() -> None:
    def loader(toy, name, w):
        if name == "b":
            raise ValueError("no module or parameter named b")
        toy.weight.data[{"a": 0, "c": 1, "d": 2}[name]].copy_(w)

    base = {name: random_bits((6,), seed=at) for at, name in enumerate("abcd")}
    live, _schema = open_live(Toy(loader, (3, 6)), base)
    assert live.routed == {0, 2, 3}
    assert "no module or parameter named b" in live.unrouted[1]
    live.close()


def test_a_tensor_that_the_model_skips_needs_no_apply() -> None:
    def loader(toy, name, w):
        if "inv_freq" not in name:
            toy.weight.data.copy_(w)

    live, _schema = open_live(Toy(loader, (8, 6)), {"rotary.inv_freq": random_bits((4,)), "w": random_bits((8, 6))})
    assert live.ignored == {0: "load_weights takes it and stores it nowhere"}
    assert (live.routed, live.unrouted) == ({1}, {})
    live.close()


def test_two_tensors_that_share_memory_are_not_routed() -> None:
    live, _ = open_live(Toy(default, (8, 6)), {"v": random_bits((8, 6)), "w": random_bits((8, 6))})
    assert live.unrouted == {0: "it shares live memory with w", 1: "it shares live memory with v"}
    live.close()


def test_memory_that_holds_elements_of_two_widths_is_not_written() -> None:
    class Mixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            raw = torch.zeros(96, dtype=torch.uint8)
            self.scale = torch.nn.Parameter(raw[:48], requires_grad=False)
            self.weight = torch.nn.Parameter(raw[48:].view(torch.bfloat16), requires_grad=False)

        def load_weights(self, weights):
            for name, w in weights:
                getattr(self, name).data.copy_(w)

    live, _ = open_live(Mixed(), {"scale": random_bits((48,), torch.uint8), "weight": random_bits((24,))})
    assert live.routed == frozenset()  # units differ, so neither may be told apart from the other
    assert "another parameter uses as elements of 1 bytes" in live.unrouted[1]
    live.close()


def test_an_alias_that_the_engine_keeps_apart_is_written_too_and_counted_once() -> None:
    def loader(toy, name, w):
        (toy.weight if name == "embed" else toy.head).data.copy_(w)

    def build():
        head = torch.nn.Parameter(torch.zeros(8, 6, dtype=torch.bfloat16), requires_grad=False)
        return Toy(loader, (8, 6), extra=[("head", head)])

    base = {"embed": random_bits((8, 6))}
    toy = build()
    toy.load_weights([("embed", base["embed"]), ("head", base["embed"])])
    live, schema = open_live(toy, base, aliases=[("head", "embed")])
    assert live.routed == {0}
    new = {"embed": changed(base["embed"], 0.5, 3)}
    plan = live.plan([patch_of(1, schema, base, new)])
    assert plan.num_elements == 2 * plan.summary.sent[0]
    assert plan.summary.owned == plan.summary.sent
    live.write(plan)
    np.testing.assert_array_equal(bits_of(toy.weight), bits_of(new["embed"]))
    np.testing.assert_array_equal(bits_of(toy.head), bits_of(new["embed"]))
    live.close()


def test_an_alias_that_shares_its_memory_is_written_once() -> None:
    base = {"embed": random_bits((8, 6))}
    toy = Toy(default, (8, 6))
    live, schema = open_live(toy, base, aliases=[("head", "embed")])
    toy.load_weights(base.items())
    new = {"embed": changed(base["embed"], 0.5, 3)}
    plan = live.plan([patch_of(1, schema, base, new)])
    assert plan.num_elements == plan.summary.sent[0] == plan.summary.owned[0]
    live.close()


def test_what_is_derived_from_weights_after_loading_keeps_them_from_being_written_in_place() -> None:
    def mla(toy, name, w):
        toy.weight.data.copy_(w)

    toy = Toy(mla, (8, 6))
    toy.W_UK = torch.nn.Parameter(torch.zeros(6, 8, dtype=torch.bfloat16), requires_grad=False)  # made from weight
    live, _ = open_live(toy, {"w": random_bits((8, 6))})
    assert "keeps W_UK, which no checkpoint tensor is loaded into" in live.unrouted[0]
    live.close()

    toy = Toy(mla, (8, 6), extra=[("_unpacked", torch.zeros(8, 6))])
    live, _ = open_live(toy, {"w": random_bits((8, 6))})
    assert "keeps _unpacked, a tensor that is no parameter or buffer" in live.unrouted[0]
    live.close()

    toy = Toy(mla, (8, 6), extra=[("cpu_linear", lambda x, w, b: x)])
    live, _ = open_live(toy, {"w": random_bits((8, 6))})
    assert "a packed copy of its weight" in live.unrouted[0]
    live.close()

    toy = Toy(mla, (8, 6), extra=[("cpu_linear", torch.nn.functional.linear), ("kv_cache", [torch.zeros(4, 4)])])
    live, _ = open_live(toy, {"w": random_bits((8, 6))})
    assert live.routed == {0}
    live.close()


def test_the_context_is_entered_around_loading() -> None:
    entered = []

    @contextlib.contextmanager
    def context():
        entered.append("in")
        yield
        entered.append("out")

    def loader(toy, name, w):
        entered.append(name)
        toy.weight.data.copy_(w)

    live = LiveModel.probe(Toy(loader, (8, 6)), schema_of({"w": random_bits((8, 6))}), context=context)
    assert entered == ["in", "w", "out"]
    with pytest.raises(RuntimeError, match="settle"):
        live.routed  # noqa: B018
    live.close()


def test_every_dtype_of_a_stream_is_known() -> None:
    assert TORCH_DTYPES.keys() == ITEMSIZE.keys()
    for spelling, width in ITEMSIZE.items():
        assert torch.empty(0, dtype=TORCH_DTYPES[spelling], device="meta").element_size() == width
