"""SkyRL's requests in our words. Data from strangers: known fields only, and what has no meaning here is refused.

Nothing here imports vLLM or SkyRL.
"""

from __future__ import annotations

from typing import Any

from torch_delta.errors import RequestRefused

TIMEOUT_S = 1800.0
"""Seconds for attaching to a stream and for each fetch: a late server copies the base and takes an anchor first."""

_INIT = frozenset({"stream", "base_model_path", "local_checkpoint_dir", "timeout_s"})
_UPDATE = frozenset({"target_version", "version", "sync_dir", "uri"})


def init_payload(*, stream: str, base_model_path: str, local_checkpoint_dir: str | None) -> dict[str, Any]:
    """What our trainer side sends to `/init_weight_transfer_engine`; without a folder each server chooses its own."""
    return {"stream": stream, "base_model_path": base_model_path, "local_checkpoint_dir": local_checkpoint_dir}


def init_request(payload: object) -> object:
    """The body of an init request for `torch_delta.vllm.replica.Replica.init`, which says what is wrong with it.

    SkyRL's own trainer engine sends other fields and no stream; that is how a server whose trainer was started without
    torch_delta_skyrl is found out.
    """
    if not isinstance(payload, dict):
        return payload
    if "stream" not in payload:
        return {"the trainer runs SkyRL's own delta engine; start it with TORCH_DELTA_SKYRL=1 too": True}
    request = {
        "stream": payload["stream"],
        "checkpoint": payload.get("local_checkpoint_dir"),
        "base": payload.get("base_model_path"),
        "timeout_s": payload.get("timeout_s", TIMEOUT_S),
    }
    return request | {name: value for name, value in payload.items() if name not in _INIT}


def update_request(payload: object) -> object:
    """The body of an update request for `Replica.update`: `target_version`, or `version` as older clients say."""
    if not isinstance(payload, dict):
        return payload
    target = payload.get("target_version")
    request = {"version": payload.get("version") if target is None else target}
    return request | {name: value for name, value in payload.items() if name not in _UPDATE}


def update_payload(stream: str, version: int) -> dict[str, Any]:
    """What our trainer side sends to `/update_weights`."""
    return {"target_version": version, "version": version, "sync_dir": stream, "uri": version_uri(stream, version)}


def fetch_payload(stream: str, version: int) -> dict[str, Any]:
    """The arguments of `fetch_weights` for a version."""
    return {"target_version": version, "sync_dir": stream, "uri": version_uri(stream, version)}


def version_uri(stream: str, version: int) -> str:
    """How a version is named in SkyRL's requests."""
    return f"{stream.rstrip('/')}/{version}"


def fetch_version(target_version: object, sync_dir: str | None, uri: str | None, stream: str | None) -> int:
    """The version to fetch.

    Raises:
        RequestRefused: not a version, or of another stream than the one that is followed.
    """
    if not isinstance(target_version, int) or isinstance(target_version, bool) or target_version < 0:
        raise RequestRefused(
            f"fetch_weights: target_version is {target_version!r}; expected a version", field="target_version"
        )
    if stream is None:
        raise RequestRefused("fetch_weights before init_weight_transfer_engine: this engine follows no stream")
    if sync_dir is not None and sync_dir.rstrip("/") != stream.rstrip("/"):
        raise RequestRefused(
            f"fetch_weights: sync_dir {sync_dir!r} is not the stream this engine follows, {stream!r}; trainer and "
            "servers need the same delta_weight_sync.sync_dir",
            field="sync_dir",
            got=sync_dir,
        )
    if uri is not None and uri != version_uri(stream, target_version):
        raise RequestRefused(
            f"fetch_weights: uri {uri!r} is not version {target_version} of {stream!r}", field="uri", got=uri
        )
    return target_version
