"""What SkyRL's own tests ask of a delta system, asked of ours: SkyRL's trainer side and client, real HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.skyrl.checkpoints import bits_of, read_bits, same, write
from tests.skyrl.receivers import Receiver
from tests.skyrl.toys import Run, step, toy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.skyrl, pytest.mark.slow, pytest.mark.usefixtures("seat")]

ROUND = ["/fetch_weights", "/pause?mode=keep&clear_cache=false", "/start_weight_update", "/update_weights"]
ROUND += ["/finish_weight_update", "/resume"]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path, toy())
    yield made
    made.close()


def test_the_seat_is_taken_through_skyrls_own_configuration(run: Run) -> None:
    assert type(run.engine).__module__ == "torch_delta_skyrl.trainer"
    assert run.engine.skyrl_handles_prefix_cache_reset
    assert run.server.calls == ["/init_weight_transfer_engine"]
    assert run.server.bodies[0]["init_info"]["stream"] == str(run.stream)


def test_rounds_are_bitwise_and_in_skyrls_order(run: Run) -> None:
    assert run.send() == 1
    for number in range(2, 5):
        step(run.tensors, number)
        run.server.calls.clear()
        assert run.send() == number
        assert run.server.calls == ROUND
        assert run.server.version == number
        assert same(run.server.loaded, bits_of(run.tensors)) == []
    assert run.engine.report.num_changed > 0


def test_nothing_changed_is_a_version_too(run: Run) -> None:
    assert [run.send(), run.send()] == [1, 2]
    assert run.engine.report.num_changed == 0
    assert same(run.server.loaded, read_bits(run.base)) == []


def test_the_prefix_cache_is_reset_inside_the_pause_when_skyrl_says_so(run: Run) -> None:
    run.engine.skyrl_set_reset_prefix_cache(True)
    run.send()
    assert run.server.calls[1:4] == [ROUND[0], ROUND[1], "/reset_prefix_cache"]


def test_a_late_server_takes_all_versions_from_the_stream(run: Run, tmp_path: Path) -> None:
    for number in range(3):
        step(run.tensors, number)
        run.send()
    with Receiver(tmp_path / "late") as late:
        late.handle("/init_weight_transfer_engine", run.server.bodies[0])
        fetch = {"target_version": 3, "sync_dir": str(run.stream), "uri": f"{run.stream}/3"}
        late.handle("/fetch_weights", fetch)
        late.handle("/pause", None)
        late.handle("/start_weight_update", None)
        late.handle("/update_weights", {"update_info": {"target_version": 3}})
        assert same(late.loaded, bits_of(run.tensors)) == []


def test_servers_of_one_host_fetch_once(tmp_path: Path) -> None:
    from tests.skyrl.trainers import build, end, weight_source

    tensors = toy()
    base = write(tmp_path / "base", tensors)
    with Receiver(tmp_path / "host") as one, Receiver(tmp_path / "host") as other:
        engine = build(base, tmp_path / "stream", [one.url, other.url], weight_source(tensors), folder=tmp_path)
        step(tensors, 1)
        engine.send_weights()
        end(engine)
        took = [r for server in (one, other) for r in server.reports if r.kind != "shared" and r.version == 1]
        assert len(took) == 1
        assert same(one.loaded, bits_of(tensors)) == []
        assert same(other.loaded, bits_of(tensors)) == []


def test_a_source_in_another_dtype_is_cast_to_the_checkpoints(tmp_path: Path) -> None:
    import torch

    wide = toy(dtype="float32")
    base = write(tmp_path / "base", {name: tensor.to(torch.bfloat16) for name, tensor in wide.items()})
    run = Run(tmp_path, wide, base)
    step(wide, 1)
    run.send()
    assert same(run.server.loaded, bits_of({n: t.to(torch.bfloat16) for n, t in wide.items()})) == []
    run.close()


def test_a_tied_head_that_is_not_in_the_checkpoint_is_left_out(tmp_path: Path) -> None:
    tensors = toy()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    base = write(tmp_path / "base", {n: t for n, t in tensors.items() if n != "lm_head.weight"}, tied=True)
    run = Run(tmp_path, tensors, base)
    step(tensors, 1)
    run.send()
    wanted = bits_of({n: t for n, t in tensors.items() if n != "lm_head.weight"})
    assert same(run.server.loaded, wanted) == []
    run.close()


def test_a_tensor_that_no_server_could_take_is_refused_by_name(tmp_path: Path) -> None:
    from torch_delta.errors import TorchDeltaError

    tensors = toy()
    base = write(tmp_path / "base", {n: t for n, t in tensors.items() if n != "model.norm.weight"})
    run = Run(tmp_path, tensors, base)
    with pytest.raises(TorchDeltaError, match=r"model\.norm\.weight"):
        run.send()
    assert run.server.version is None
    run.close()


def test_tensors_the_trainer_does_not_export_stay_as_they_are(tmp_path: Path) -> None:
    tensors = toy()
    base = write(tmp_path / "base", tensors | {"mtp.layer.weight": tensors["model.norm.weight"].clone()})
    run = Run(tmp_path, tensors, base)
    step(tensors, 1)
    run.send()
    assert same(run.server.loaded, bits_of(tensors) | {"mtp.layer.weight": read_bits(base)["mtp.layer.weight"]}) == []
    run.close()


def test_payloads_are_split_by_size(tmp_path: Path) -> None:
    import torch

    tensors = {f"model.layers.{n}.weight": torch.randn(512, 512).to(torch.bfloat16) for n in range(4)}
    run = Run(tmp_path, tensors, max_file_size_in_gb=1 / 1024)
    run.send()
    before = {path for path in (tmp_path / "stream").rglob("*") if path.is_file()}
    for tensor in tensors.values():
        tensor.add_(1)
    run.send()
    new = [path for path in (tmp_path / "stream").rglob("*") if path.is_file() and path not in before]
    assert len([path for path in new if path.stat().st_size > 10_000]) > 1
    assert all(path.stat().st_size <= 1 << 20 for path in new)
    assert same(run.server.loaded, bits_of(tensors)) == []
    run.close()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cloud_download_workers", 9),
        ("checkpoint_load_format", "vllm_fastsafetensors"),
        ("multi_thread_safetensors_max_workers", 2),
    ],
)
def test_a_field_without_a_counterpart_is_refused(tmp_path: Path, field: str, value: Any) -> None:
    from torch_delta.errors import RequestRefused

    with pytest.raises(RequestRefused, match=f"delta_weight_sync.{field} is"):
        Run(tmp_path, toy(), **{field: value})


def test_a_failed_fetch_pauses_nobody_and_the_next_round_leads_on(run: Run) -> None:
    run.send()
    run.server.fail_fetch = RuntimeError("no route to the bucket")
    run.server.calls.clear()
    step(run.tensors, 1)
    with pytest.raises(RuntimeError, match="no route to the bucket"):
        run.send()
    assert run.server.calls == ["/fetch_weights"]
    run.server.fail_fetch = None
    step(run.tensors, 2)
    assert run.send() == 3
    assert same(run.server.loaded, bits_of(run.tensors)) == []
