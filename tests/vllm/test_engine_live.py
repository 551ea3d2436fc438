"""The engine inside real vLLM, in this process: one tiny model, one stream, and what happens to them in turn."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.engines import Engine, differing
from tests.vllm.following import TIMEOUT_S, Following
from tests.vllm.tiny import Versions
from torch_delta import crashpoints
from torch_delta.errors import ApplyFailed, BaseMismatch, ChainError, RequestRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

LONG_PROMPT = [(7 * at) % 250 + 1 for at in range(96)]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("engine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_DELTA_ALLOWED_PATHS", str(folder))
        patch.setenv("TORCH_DELTA_CHECKPOINT_ROOT", str(folder / "root"))
        yield folder


@pytest.fixture(scope="module")
def running(environment: Path, checkpoint: Callable[..., Path]) -> Iterator[Following]:
    base = checkpoint("qwen3")
    with Versions(base, environment / "stream") as versions, Engine(base, delta=True) as engine:
        yield Following(engine, versions)


def test_before_init_everything_says_what_to_do(running: Following) -> None:
    with pytest.raises(RequestRefused, match="start_weight_update before it"):
        running.llm.update_weights({"update_info": {"version": 1}})
    with pytest.raises(RequestRefused, match="init_info"):
        running.update(1)
    with pytest.raises(RequestRefused, match="unknown field streem; known: stream, checkpoint"):
        running.llm.init_weight_transfer_engine({"init_info": {"streem": "x"}})
    with pytest.raises(RequestRefused, match="TORCH_DELTA_ALLOWED_PATHS"):  # F117
        running.llm.init_weight_transfer_engine({"init_info": {"stream": "/etc"}})
    with pytest.raises(RequestRefused, match="draft"):  # F72
        running.llm.start_draft_weight_update()
    status = running.status()
    assert (status["state"], status["ready"], status["session"]) == ("new", False, False)


def test_versions_arrive_bit_for_bit_and_outputs_are_those_of_a_fresh_engine(
    running: Following, environment: Path
) -> None:
    before = running.engine.greedy([LONG_PROMPT])  # fills the prefix cache with KV of version 0
    status = running.init()
    assert (status["version"], status["ready"]) == (0, True)
    assert status["routes"]["reload"] == {}
    running.versions.sparse(1)
    running.versions.dense(2, names=["model.layers.0.mlp.down_proj.weight", "model.norm.weight"])
    running.versions.sparse(3)
    assert running.prepare()["plan"] == "patch"
    running.update(3)
    assert running.llm.get_weight_version() == "3"
    with Engine(running.versions.write(3, environment / "fresh")) as fresh:
        assert differing(running.engine.parameters(), fresh.parameters()) == []
        # F109: stale KV of the long prompt would show here.
        after = running.engine.greedy([LONG_PROMPT])
        assert after == fresh.greedy([LONG_PROMPT])
    assert after != before


def test_reload_and_patch_agree(running: Following) -> None:
    running.versions.sparse(4)
    running.to_newest()
    patched = running.engine.parameters()
    running.update(running.versions.version, mode="reload")
    assert running.status()["last_apply"]["kind"] == "reload"
    assert differing(patched, running.engine.parameters()) == []


def test_special_values_are_values(running: Following) -> None:
    """F27: NaNs with payloads, both zeros, infinities."""
    version = running.versions.version
    running.versions.special(5)
    assert running.prepare()["plan"] == "patch"
    running.update(version + 1)
    patched = running.engine.parameters()
    running.update(version + 1, mode="reload")
    assert differing(patched, running.engine.parameters()) == []
    old = {name: (range(bits.size), bits.reshape(-1)) for name, bits in running.versions.bits(version).items()}
    running.versions.edit(old)  # back to weights that make tokens
    running.to_newest()


@pytest.mark.parametrize("point", ["vllm.write_job", "vllm.written"])
def test_an_exception_in_the_middle_of_an_apply_changes_nothing(running: Following, point: str) -> None:
    version = running.versions.version
    before, said = running.engine.parameters(), running.engine.greedy()
    running.versions.sparse(6)
    running.prepare()
    with crashpoints.armed(point, fail), pytest.raises(ApplyFailed, match="in the middle") as caught:
        running.update(version + 1)
    assert caught.value.undone is True
    assert differing(before, running.engine.parameters()) == []
    status = running.status()
    assert (status["version"], status["ready"], status["session"]) == (version, True, False)
    assert running.llm.get_weight_version() == str(version)
    assert running.engine.greedy() == said
    running.update(version + 1)
    assert running.status()["version"] == version + 1


def test_a_failed_reload_leaves_a_server_that_answers_and_says_dirty(running: Following) -> None:
    version = running.versions.version
    model = running.engine.model
    load_weights = model.load_weights

    def torn(weights: Any) -> Any:
        def some() -> Iterator[Any]:
            for number, pair in enumerate(weights):
                if number == 7:
                    fail()
                yield pair

        return load_weights(some())

    model.load_weights = torn
    try:
        with pytest.raises(ApplyFailed, match="in the middle"):
            running.update(version, mode="reload")
    finally:
        del model.load_weights
    status = running.status()
    assert (status["state"], status["version"], status["ready"]) == ("dirty", None, False)
    assert running.engine.greedy([[1, 2, 3]]), "no parameter is left on the meta device"
    running.update(version)
    assert (running.status()["version"], running.status()["ready"]) == (version, True)


def test_weights_that_vllm_itself_resets_are_lost_and_come_back(running: Following) -> None:
    """F120: as after sleep level 2, which CPU engines do not have. Before 0.32 vLLM has a reload, and no reset."""
    version = running.versions.version
    before = running.engine.parameters()
    has_reset = hasattr(type(running.engine.worker), "reset_weights")
    running.llm.collective_rpc("reset_weights" if has_reset else "reload_weights")
    assert differing(before, running.engine.parameters()) != []
    status = running.status()
    assert (status["state"], status["version"], status["ready"]) == ("lost", None, False)
    running.update(version)
    assert differing(before, running.engine.parameters()) == []
    assert running.status()["ready"]


def test_generation_goes_on_while_a_version_is_prepared(running: Following, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_delta.vllm.host import Host

    reached, go = threading.Event(), threading.Event()
    bring = Host.bring

    def slow(self: Host, *args: Any, **kwargs: Any) -> Any:
        reached.set()
        assert go.wait(TIMEOUT_S)
        return bring(self, *args, **kwargs)

    monkeypatch.setattr(Host, "bring", slow)
    version = running.versions.sparse(8)
    running.llm.collective_rpc("torch_delta_prepare", args=({"version": version},))
    assert reached.wait(TIMEOUT_S)
    assert len(running.engine.greedy([[5, 6, 7]])[0]) > 0
    status = running.status()
    assert (status["preparing"]["phase"], status["prepared"]) == ("fetch", version - 1)
    go.set()
    running.settled(lambda status: status["prepared"] == version)
    running.update(version)


def test_missing_and_damaged_versions_leave_it_serving(running: Following, environment: Path) -> None:
    version = running.versions.version
    status = running.prepare(version + 1, timeout_s=0.2)
    assert status["error"]["type"] == "DeadlineExceeded"
    with pytest.raises(RequestRefused, match=r"not prepared here.*The last preparation failed"):
        running.update(version + 1)
    running.versions.sparse(9)
    parts = environment / "stream" / "parts"
    part = max(parts.rglob("*.safetensors"), key=lambda path: path.parent.name + path.name)
    good = part.read_bytes()
    part.chmod(0o644)
    part.write_bytes(good[:-5] + bytes([good[-5] ^ 1]) + good[-4:])
    status = running.prepare(version + 1)
    assert status["error"] is not None
    assert (status["version"], status["ready"]) == (version, True)
    part.write_bytes(good)
    running.to_newest()


def test_versions_are_not_taken_back(running: Following) -> None:
    version = running.versions.version
    with pytest.raises(ChainError, match="not taken back"):
        running.update(version - 1)
    assert running.status()["version"] == version


def test_the_whole_model_can_be_verified_while_it_serves(running: Following) -> None:
    running.llm.collective_rpc("torch_delta_verify")
    status = running.settled(lambda status: not status["verifying"])
    assert (status["verified_full"]["ok"], status["verified_full"]["version"]) == (True, running.versions.version)
    assert status["verified_full"]["num_tensors"] == status["routes"]["num_routed"]


def test_the_cache_reset_is_checked(running: Following, monkeypatch: pytest.MonkeyPatch) -> None:
    """F109: a reset that does nothing is a failure, and the server is not ready."""
    core = running.llm.llm_engine.engine_core.engine_core
    version = running.versions.version
    running.versions.sparse(10)
    running.prepare()
    with monkeypatch.context() as patch:
        patch.setattr(core.scheduler, "reset_prefix_cache", lambda *_: False)
        with pytest.raises(ApplyFailed, match="could not be dropped"):
            running.update(version + 1)
    assert running.llm.get_weight_version() == str(version), "not announced"
    status = running.status()
    assert (status["version"], status["ready"], status["stale_cache"] is not None) == (version + 1, False, True)
    running.llm.start_weight_update()
    running.llm.finish_weight_update()
    assert running.status()["ready"]
    assert running.llm.get_weight_version() == str(version + 1)


def test_a_fork_before_the_version_it_serves_is_followed_by_a_reload(running: Following, environment: Path) -> None:
    """A trainer takes over from an older version; what the engine serves meanwhile was given up (rules N6, L6)."""
    # rules N6, L6
    versions = running.versions
    versions.sparse(21)
    left = versions.sparse(22)
    running.to_newest()
    before = running.status()
    assert (before["version"], before["ready"]) == (left, True)
    versions.restart(left - 2)
    versions.sparse(23)
    versions.dense(24, names=["model.layers.1.self_attn.q_proj.weight", "model.norm.weight"])
    running.llm.collective_rpc("torch_delta_prepare", args=({"version": 2},))
    status = running.settled(
        lambda status: status["stream_id"] != before["stream_id"] and status["prepared"] == versions.version
    )
    assert status["error"] is None
    assert (status["version"], status["ready"], status["plan"]) == (None, False, "reload"), "it serves no version of it"
    assert running.engine.greedy([[1, 2, 3]]), "and goes on serving what it had"
    running.update(2)
    status = running.status()
    assert (status["version"], status["ready"], status["last_apply"]["kind"]) == (2, True, "reload")
    assert status["stream_id"] not in {None, before["stream_id"]}
    assert running.llm.get_weight_version() == "2"
    with Engine(versions.write(2, environment / "forked"), delta=True) as fresh:
        assert differing(running.engine.parameters(), fresh.parameters()) == []
        assert running.engine.greedy() == fresh.greedy()
    versions.sparse(25)  # from there on it is a stream like any other
    running.to_newest()
    assert running.status()["last_apply"]["kind"] == "patch"
    patched = running.engine.parameters()
    running.update(3, mode="reload")
    assert differing(patched, running.engine.parameters()) == []


@pytest.mark.parametrize(("family", "options"), [("llama", {}), ("qwen3", {"seed": 1})], ids=["model", "base"])
def test_another_stream_is_refused_and_the_server_goes_on(
    running: Following, environment: Path, checkpoint: Callable[..., Path], family: str, options: dict[str, Any]
) -> None:
    """Of another model, and of the same one from other weights."""
    with Versions(checkpoint(family, **options), environment / f"another-{family}") as another:
        status = Following(running.engine, another).init()
    assert status["error"]["type"] == "BaseMismatch"
    assert (status["attached"], status["ready"]) == (False, False)
    with pytest.raises(BaseMismatch):
        running.update(1)
    assert running.engine.greedy([[1, 2, 3]])
    status = running.init(mode="reload")
    assert status["needs_reload"], "started from version 0, the host is further on"
    running.update(running.versions.version)
    assert running.status()["ready"]


def fail() -> None:
    raise RuntimeError("in the middle")
