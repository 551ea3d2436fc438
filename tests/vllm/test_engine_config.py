"""Requests are data from strangers: known fields only, and paths only where the operator allowed them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from torch_delta.errors import RequestRefused
from torch_delta.vllm.config import InitInfo, Operator, PrepareInfo, UpdateInfo, parse, resolve

if TYPE_CHECKING:
    from pathlib import Path

SERVED = "org/model"


@pytest.fixture
def operator(tmp_path: Path) -> Operator:
    (tmp_path / "allowed").mkdir()
    return Operator.from_environment(
        {
            "TORCH_DELTA_CHECKPOINT_ROOT": str(tmp_path / "root"),
            "TORCH_DELTA_ALLOWED_PATHS": str(tmp_path / "allowed"),
            "TORCH_DELTA_STREAM": "/outside/stream",
            "TORCH_DELTA_BASE": "org/base",
        }
    )


@pytest.mark.parametrize(
    ("kind", "request_", "says"),
    [
        (
            InitInfo,
            {"strem": "x"},
            "unknown field strem; known: stream, checkpoint, base, mode, timeout_s, auto_follow",
        ),
        (InitInfo, [], "expected an object"),
        (InitInfo, None, "got NoneType"),
        (InitInfo, {"stream": 3}, "stream is 3; expected a text"),
        (InitInfo, {"stream": ""}, "expected a text"),
        (InitInfo, {"mode": "fast"}, "expected auto or reload"),
        (InitInfo, {"timeout_s": 0}, "seconds above 0"),
        (InitInfo, {"timeout_s": True}, "seconds above 0"),
        (InitInfo, {"timeout_s": float("nan")}, "seconds above 0"),
        (InitInfo, {"auto_follow": "yes"}, "true or false"),
        (InitInfo, {"auto_apply": True}, "VLLM_PLUGINS=torch_delta"),
        (UpdateInfo, {}, "missing 1 required.*version"),
        (UpdateInfo, {"version": -1}, "0 or more"),
        (UpdateInfo, {"version": True}, "0 or more"),
        (UpdateInfo, {"version": 1.0}, "0 or more"),
        (UpdateInfo, {"version": 1, "weights": []}, "unknown field weights; known: version, mode"),
        (PrepareInfo, {"version": "head"}, "a version, or null"),
        (PrepareInfo, {"timeout_s": -1}, "seconds above 0, or null"),
    ],
)
def test_requests_that_make_no_sense(kind: type[Any], request_: object, says: str) -> None:
    """F115, F116."""
    with pytest.raises(RequestRefused, match=says):
        parse(kind, request_)


def test_defaults_come_from_the_operator_and_the_served_model(operator: Operator, tmp_path: Path) -> None:
    settings = resolve(parse(InitInfo, {}), operator, SERVED)
    assert settings.stream == "/outside/stream"
    assert settings.base == "org/base"
    assert settings.checkpoint.parent == tmp_path / "root"
    assert settings.checkpoint.name.startswith("stream-")
    again = resolve(parse(InitInfo, {}), operator, "another/model")
    assert again.checkpoint == settings.checkpoint, "engines of a host share the working copy"


def test_without_a_stream_there_is_nothing_to_follow(tmp_path: Path) -> None:
    nobody = Operator.from_environment({"TORCH_DELTA_CHECKPOINT_ROOT": str(tmp_path)})
    with pytest.raises(RequestRefused, match="TORCH_DELTA_STREAM is not set"):
        resolve(InitInfo(), nobody, SERVED)
    assert resolve(InitInfo(stream="s3://bucket/run"), nobody, SERVED).base == SERVED


@pytest.mark.parametrize("url", ["/etc", "etc", "file:///etc", "FILE:///etc", "file:///%65tc", "~", "{allowed}/../x"])
def test_local_streams_outside_the_allowed_folders_are_refused(operator: Operator, tmp_path: Path, url: str) -> None:
    """F117."""
    with pytest.raises(RequestRefused, match="TORCH_DELTA_ALLOWED_PATHS"):
        resolve(InitInfo(stream=url.format(allowed=tmp_path / "allowed")), operator, SERVED)


def test_local_streams_inside_are_taken(operator: Operator, tmp_path: Path) -> None:
    for url in (f"{tmp_path}/allowed/run", f"file://{tmp_path}/allowed/run", "s3://bucket/run", "/outside/stream"):
        assert resolve(InitInfo(stream=url), operator, SERVED).stream == url


def test_a_link_out_of_an_allowed_folder_leads_nowhere(operator: Operator, tmp_path: Path) -> None:
    (tmp_path / "allowed" / "link").symlink_to("/etc")
    with pytest.raises(RequestRefused, match="lies outside"):
        resolve(InitInfo(stream=f"{tmp_path}/allowed/link"), operator, SERVED)


@pytest.mark.parametrize("checkpoint", ["../x", "/etc/x", "a/../../x"])
def test_checkpoints_stay_under_the_root(operator: Operator, checkpoint: str) -> None:
    with pytest.raises(RequestRefused, match="checkpoint"):
        resolve(InitInfo(checkpoint=checkpoint), operator, SERVED)


def test_checkpoints_may_have_a_name_or_an_allowed_place(operator: Operator, tmp_path: Path) -> None:
    assert resolve(InitInfo(checkpoint="mine"), operator, SERVED).checkpoint == tmp_path / "root" / "mine"
    inside = tmp_path / "allowed" / "mine"
    assert resolve(InitInfo(checkpoint=str(inside)), operator, SERVED).checkpoint == inside


@pytest.mark.parametrize(
    ("base", "says"), [("evil/model", "TORCH_DELTA_BASE"), ("/etc", "lies outside"), ("./x", "lies outside")]
)
def test_no_model_that_a_request_names_is_downloaded(operator: Operator, base: str, says: str) -> None:
    """F117."""
    with pytest.raises(RequestRefused, match=says):
        resolve(InitInfo(base=base), operator, SERVED)


def test_bases_that_are_known_are_taken(operator: Operator, tmp_path: Path) -> None:
    for base in (SERVED, "org/base", str(tmp_path / "allowed" / "base")):
        assert resolve(InitInfo(base=base), operator, SERVED).base == base


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        ({"TORCH_DELTA_CHECKPOINT_ROOT": "relative"}, "TORCH_DELTA_CHECKPOINT_ROOT"),
        ({"TORCH_DELTA_ALLOWED_PATHS": "/a:relative"}, "TORCH_DELTA_ALLOWED_PATHS"),
        ({"TORCH_DELTA_AUTO_FOLLOW": "yes"}, "TORCH_DELTA_AUTO_FOLLOW"),
        ({"TORCH_DELTA_AUTO_APPLY": "1"}, "VLLM_PLUGINS=torch_delta"),
        ({"TORCH_DELTA_AUTO_APPLY": "1", "VLLM_PLUGINS": "other"}, "VLLM_PLUGINS=torch_delta"),
    ],
)
def test_an_environment_that_makes_no_sense(environment: dict[str, str], names: str) -> None:
    with pytest.raises(RequestRefused, match=names):
        Operator.from_environment(environment)
