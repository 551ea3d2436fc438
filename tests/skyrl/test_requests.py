"""Requests, settings and hooks, as far as they need neither SkyRL nor vLLM."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import pytest

from torch_delta.errors import RequestRefused, UnsupportedFormat
from torch_delta.vllm import supervisor
from torch_delta.vllm.config import InitInfo, UpdateInfo, parse
from torch_delta_skyrl import contract, registering, requests, settings


def test_an_init_request_says_the_same_to_our_engine() -> None:
    payload = requests.init_payload(stream="s3://b/run", base_model_path="Qwen/Q", local_checkpoint_dir="/nvme/q")
    info = parse(InitInfo, requests.init_request(payload))
    assert (info.stream, info.base, info.checkpoint) == ("s3://b/run", "Qwen/Q", "/nvme/q")
    assert info.timeout_s == requests.TIMEOUT_S


@pytest.mark.parametrize("extra", [{"mode": "fast"}, {"shell": "rm"}])
def test_unknown_or_senseless_fields_are_refused(extra: dict[str, Any]) -> None:
    payload = requests.init_payload(stream="s3://b/run", base_model_path="q", local_checkpoint_dir="/q") | extra
    with pytest.raises(RequestRefused, match=next(iter(extra))):
        parse(InitInfo, requests.init_request(payload))
    with pytest.raises(RequestRefused, match=next(iter(extra))):
        parse(UpdateInfo, requests.update_request({"target_version": 1, **extra}))


def test_a_server_finds_out_that_its_trainer_is_skyrls_own() -> None:
    with pytest.raises(RequestRefused, match="TORCH_DELTA_SKYRL=1"):
        parse(InitInfo, requests.init_request({"base_model_path": "q", "local_checkpoint_dir": "/q"}))


def test_an_update_names_its_version_in_either_way() -> None:
    assert parse(UpdateInfo, requests.update_request({"target_version": 4, "uri": "x"})).version == 4
    assert parse(UpdateInfo, requests.update_request({"version": 5, "sync_dir": "x"})).version == 5
    for body in ({}, [], {"target_version": "4"}, {"target_version": True}):
        with pytest.raises(RequestRefused, match="update_info"):
            parse(UpdateInfo, requests.update_request(body))


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((-1, None, None), "target_version"),
        ((True, None, None), "target_version"),
        (("3", None, None), "target_version"),
        ((3, "s3://other", None), "sync_dir"),
        ((3, "s3://b/run", "s3://b/run/4"), "uri"),
    ],
)
def test_a_fetch_is_of_the_stream_that_is_followed(arguments: Any, field: str) -> None:
    with pytest.raises(RequestRefused, match=field):
        requests.fetch_version(*arguments, stream="s3://b/run")


def test_a_fetch_with_all_of_skyrls_fields() -> None:
    uri = requests.version_uri("s3://b/run/", 3)
    assert requests.fetch_version(3, "s3://b/run/", uri, stream="s3://b/run") == 3


@dataclasses.dataclass
class Delta:
    """The fields of SkyRL's init info that are read, with its defaults."""

    max_file_size_in_gb: float = 1.0
    cloud_download_workers: int = 4
    publish_num_workers: int | None = None
    checkpoint_load_format: str = "vllm_multi_thread_safetensors"
    multi_thread_safetensors_max_workers: int = 8


def test_fields_keep_their_meaning() -> None:
    config = settings.publish_config(Delta(max_file_size_in_gb=0.25, publish_num_workers=3))
    assert (config.part_bytes, config.num_encode_threads, config.every) == (256 << 20, 3, None)


@pytest.mark.parametrize("field", ["cloud_download_workers", "multi_thread_safetensors_max_workers"])
def test_fields_without_a_counterpart_are_refused(field: str) -> None:
    with pytest.raises(RequestRefused, match=f"{field} is 3, which does nothing"):
        settings.publish_config(Delta(**{field: 3}))


def test_a_file_size_that_cannot_work_is_refused() -> None:
    with pytest.raises(RequestRefused, match="max_file_size_in_gb is 0"):
        settings.publish_config(Delta(max_file_size_in_gb=0))


@pytest.mark.parametrize("found", [None, "0.2.0", "0.3.1", "0.4.1", "0.5.0"])
def test_another_release_of_skyrl_is_refused_by_name(found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "installed", lambda: found)
    with pytest.raises(UnsupportedFormat, match=r"works with skyrl 0\.4\.0 and 0\.3\.0") as caught:
        registering.register()
    assert str(found) in str(caught.value) or found is None
    assert os.environ.get(registering.ENABLED) != "1" or contract.installed() is found


def test_the_hook_of_ray_puts_ours_into_every_worker() -> None:
    env = registering.ray_hook({"env_vars": {"A": "1"}, "working_dir": "x"})
    assert env["worker_process_setup_hook"] == "torch_delta_skyrl.registering.set_up_worker"
    assert env["env_vars"] == {"A": "1", registering.ENABLED: "1"}
    assert registering.ray_hook(env) == env
    with pytest.raises(UnsupportedFormat, match=r"mine\.hook"):
        registering.ray_hook({"worker_process_setup_hook": "mine.hook"})


def test_the_hook_gives_the_operators_words_to_every_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DELTA_ALLOWED_PATHS", "/mnt/shared")
    monkeypatch.setenv("TORCH_DELTA_SKYRL_SYNC_DIR", "s3://b/run")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "dummy")
    found = registering.ray_hook({"env_vars": {"TORCH_DELTA_SKYRL_SYNC_DIR": "s3://b/another"}})["env_vars"]
    assert found["TORCH_DELTA_ALLOWED_PATHS"] == "/mnt/shared"
    assert found["TORCH_DELTA_SKYRL_SYNC_DIR"] == "s3://b/another", "what the job says itself wins"
    assert "AWS_SECRET_ACCESS_KEY" not in found


def test_an_action_runs_right_after_a_module_is_imported_and_once() -> None:
    code = (
        "import sys; from torch_delta_skyrl.importing import when_imported; seen = [];"
        "when_imported('colorsys', lambda m: seen.append(m.hls_to_rgb.__name__)); assert not seen;"
        "import colorsys; assert seen == ['hls_to_rgb'], seen; import colorsys; assert len(seen) == 1;"
        "when_imported('colorsys', lambda m: seen.append(2)); assert seen[1] == 2;"
        "assert not any('importing' in type(f).__module__ for f in sys.meta_path); print('ok')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "ok", done.stderr


@pytest.mark.parametrize("keeps", [True, False])
def test_the_engine_core_leaves_the_prefix_cache_to_skyrl(keeps: bool) -> None:
    done: list[Any] = []

    class Core:
        def reset_caches(self) -> bool:
            done.append("reset")
            return True

        def announce(self, version: int) -> None:
            done.append(version)

    def call(method: str, *, args: Any = (), kwargs: Any = None) -> list[Any]:
        outcome = {"session": True, "ok": True, "error": None, "version": 3, "keeps_cache": keeps}
        return [outcome] if method == "torch_delta_outcome" else [None]

    supervisor.supervise(call, Core(), supervisor.FINISH, (), {})
    assert done == ([3] if keeps else ["reset", 3])
