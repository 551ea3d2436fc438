"""What a server may be told, and by whom: the operator by the environment, anybody who reaches its port by requests.

Requests are data from strangers (F116, F117): plain JSON objects with known fields only, and a path in one of them must
lie in a folder that the operator allowed. Nothing here imports vLLM.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args
from urllib.parse import unquote, urlsplit

from torch_delta.errors import RequestRefused

BACKEND = "torch_delta"
"""Name of the backend in ``--weight-transfer-config`` and of the plugin's entry points."""

Mode = Literal["auto", "reload"]
"""``"auto"``: index writes where the routes are proved, else reload. ``"reload"``: always reload."""

STREAM = "TORCH_DELTA_STREAM"
BASE = "TORCH_DELTA_BASE"
CHECKPOINT_ROOT = "TORCH_DELTA_CHECKPOINT_ROOT"
ALLOWED_PATHS = "TORCH_DELTA_ALLOWED_PATHS"
AUTO_FOLLOW = "TORCH_DELTA_AUTO_FOLLOW"
AUTO_APPLY = "TORCH_DELTA_AUTO_APPLY"

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(@[\w./-]+)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """What the environment of the server says; requests are held against it."""

    stream: str | None
    """``TORCH_DELTA_STREAM``: followed when a request names no other; the engine then needs no init request."""
    base: str | None
    """``TORCH_DELTA_BASE``: where the host's checkpoint is copied from, when that is not the served model."""
    checkpoint_root: Path
    """``TORCH_DELTA_CHECKPOINT_ROOT``: host checkpoints lie under it; by default in the user's cache."""
    allowed: tuple[Path, ...]
    """``TORCH_DELTA_ALLOWED_PATHS``: further folders from which requests may name streams, bases and checkpoints."""
    auto_follow: bool
    """``TORCH_DELTA_AUTO_FOLLOW``: prepare every new version as it appears."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Self:
        """Read the variables once.

        Raises:
            RequestRefused: one of them makes no sense; names it.
        """
        env = os.environ if environment is None else environment
        cache = Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        root = Path(env.get(CHECKPOINT_ROOT) or cache / "torch_delta" / "checkpoints").expanduser()
        allowed = [Path(text).expanduser() for text in env.get(ALLOWED_PATHS, "").split(os.pathsep) if text]
        for name, path in ((CHECKPOINT_ROOT, root), *((ALLOWED_PATHS, path) for path in allowed)):
            if not path.is_absolute():
                raise RequestRefused(f"{name}: {str(path)!r} is relative; give an absolute path", field=name)
        follow = env.get(AUTO_FOLLOW, "0")
        if follow not in {"0", "1"}:
            raise RequestRefused(f"{AUTO_FOLLOW} is {follow!r}; expected 0 or 1", field=AUTO_FOLLOW, got=follow)
        if env.get(AUTO_APPLY, "0") == "1" and BACKEND not in env.get("VLLM_PLUGINS", "").split(","):
            raise RequestRefused(
                f"{AUTO_APPLY}=1: versions are applied at once by the endpoint plugin, which can pause the scheduler; "
                "load it with VLLM_PLUGINS=torch_delta",
                field=AUTO_APPLY,
            )
        return cls(
            stream=env.get(STREAM) or None,
            base=env.get(BASE) or None,
            checkpoint_root=root,
            allowed=(root, *allowed),
            auto_follow=follow == "1",
        )

    def permits(self, path: Path) -> bool:
        """Whether a request may name this path; symbolic links and ``..`` are followed first."""
        real = path.resolve()
        return any(real.is_relative_to(folder.resolve()) for folder in self.allowed)


@dataclass(frozen=True, kw_only=True, slots=True)
class InitInfo:
    """Body of the init request, as it was sent."""

    stream: str | None = None
    """URL of the stream."""
    checkpoint: str | None = None
    """Folder of this host's working copy; relative to the checkpoint root, or absolute in an allowed folder."""
    base: str | None = None
    """Where the working copy starts from: by default the served model."""
    mode: Mode = "auto"
    """How versions are applied."""
    timeout_s: float = 600.0
    """Seconds for attaching to the stream and for each preparation."""
    auto_follow: bool | None = None
    """Prepare every new version as it appears; None leaves it to the operator."""
    auto_apply: bool = False
    """Not for an engine: whoever applies must pause the scheduler first."""

    WHAT: ClassVar[str] = "init_info"

    def __post_init__(self) -> None:
        """Check every field."""
        for name in ("stream", "checkpoint", "base"):
            _need(self.WHAT, name, getattr(self, name), _is_text_or_none, "a text")
        _need(self.WHAT, "mode", self.mode, lambda v: v in get_args(Mode), " or ".join(get_args(Mode)))
        _need(self.WHAT, "timeout_s", self.timeout_s, _is_seconds, "seconds above 0")
        _need(self.WHAT, "auto_follow", self.auto_follow, lambda v: v is None or isinstance(v, bool), "true or false")
        if self.auto_apply is not False:
            raise RequestRefused(
                "init_info: auto_apply: an engine cannot pause its own scheduler. Load the endpoint plugin "
                "(VLLM_PLUGINS=torch_delta) and set TORCH_DELTA_AUTO_APPLY=1, which applies from the API process",
                field="auto_apply",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateInfo:
    """Body of the update request, as it was sent."""

    version: int
    """To go to; prepared before."""
    mode: Mode = "auto"
    """``"reload"`` reloads everything from the host's checkpoint, whatever was prepared."""
    stream_id: str | None = None
    """Of the stream that the version is of; None for the one that the engine follows now."""

    WHAT: ClassVar[str] = "update_info"

    def __post_init__(self) -> None:
        """Check every field."""
        _need(self.WHAT, "version", self.version, _is_version, "a version: 0 or more")
        _need(self.WHAT, "stream_id", self.stream_id, _is_text_or_none, "a stream id, or null")
        _need(self.WHAT, "mode", self.mode, lambda v: v in get_args(Mode), " or ".join(get_args(Mode)))


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareInfo:
    """Argument of the worker method that starts a preparation."""

    version: int | None = None
    """To prepare; None for the newest one at the time."""
    timeout_s: float | None = None
    """Seconds for this preparation; None for what the init request said."""
    stream_id: str | None = None
    """Of the stream that the version is of: the one that is followed, or one that continues it. None for the newest of
    these."""

    WHAT: ClassVar[str] = "prepare"

    def __post_init__(self) -> None:
        """Check every field."""
        _need(self.WHAT, "version", self.version, lambda v: v is None or _is_version(v), "a version, or null")
        _need(self.WHAT, "timeout_s", self.timeout_s, lambda v: v is None or _is_seconds(v), "seconds above 0, or null")
        _need(self.WHAT, "stream_id", self.stream_id, _is_text_or_none, "a stream id, or null")


def parse(kind: type[Any], request: object) -> Any:
    """A request's JSON object as `InitInfo`, `UpdateInfo` or `PrepareInfo`.

    Raises:
        RequestRefused: not an object, a required field missing, an unknown field (the known ones are listed), or a
            value that makes no sense.
    """
    known = [field.name for field in fields(kind)]
    if not isinstance(request, Mapping):
        raise RequestRefused(f"{kind.WHAT}: expected an object with {', '.join(known)}, got {type(request).__name__}")
    unknown = sorted(str(name) for name in request.keys() - set(known))
    if unknown:
        raise RequestRefused(
            f"{kind.WHAT}: unknown field {', '.join(unknown)}; known: {', '.join(known)}", field=unknown[0]
        )
    try:
        return kind(**request)
    except TypeError as error:
        raise RequestRefused(f"{kind.WHAT}: {error}; fields: {', '.join(known)}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """An init request held against the operator's environment: what an engine does from now on."""

    stream: str
    """URL of the stream."""
    checkpoint: Path
    """Folder of this host's working copy."""
    base: str
    """Folder or Hub id that the working copy starts from."""
    mode: Mode
    """How versions are applied."""
    timeout_s: float
    """Seconds for attaching and for each preparation."""
    auto_follow: bool
    """Prepare every new version as it appears."""


def resolve(info: InitInfo, operator: Operator, served: str) -> Settings:
    """Decide what a request means on this server.

    Args:
        info: the request.
        operator: the environment.
        served: folder or Hub id of the served model, as vLLM was told (``name@revision`` with a revision).

    Raises:
        RequestRefused: no stream named by anybody, or a path or model that the operator did not allow.
    """
    stream = info.stream if info.stream is not None else operator.stream
    if stream is None:
        raise RequestRefused(
            f"init_info names no stream, and {STREAM} is not set; give one of them the stream's URL", field="stream"
        )
    if stream != operator.stream:
        path = _local_path(stream)
        if path is not None and not operator.permits(path):
            raise _outside("stream", stream, operator)
    if info.checkpoint is None:
        checkpoint = operator.checkpoint_root / _folder_name(stream)
    else:
        checkpoint = operator.checkpoint_root / info.checkpoint
        if not operator.permits(checkpoint):
            raise _outside("checkpoint", info.checkpoint, operator)
    base = info.base if info.base is not None else (operator.base or served)
    if base not in {served, operator.base} and not (Path(base).is_absolute() and operator.permits(Path(base))):
        if _HUB_ID.fullmatch(base) and not Path(base).exists():
            raise RequestRefused(
                f"init_info: base {base!r} is not the served model {served!r}; a server downloads no model that a "
                f"request names. Let the operator set {BASE}",
                field="base",
                got=base,
            )
        raise _outside("base", base, operator)
    return Settings(
        stream=stream,
        checkpoint=checkpoint,
        base=base,
        mode=info.mode,
        timeout_s=float(info.timeout_s),
        auto_follow=operator.auto_follow if info.auto_follow is None else info.auto_follow,
    )


def _local_path(url: str) -> Path | None:
    """The folder a stream's URL names on this host, or None for a remote one."""
    scheme = _SCHEME.match(url)
    if scheme is None:
        return Path(url).expanduser().absolute()
    return Path(unquote(urlsplit(url).path)) if scheme.group(1).lower() == "file" else None


def _folder_name(stream: str) -> str:
    """One folder per stream, the same for every engine of the host; readable, and free of whatever a URL may hold."""
    words = re.sub(r"[^A-Za-z0-9._-]+", "-", stream.rstrip("/").rpartition("/")[2]).strip("-.")[:48]
    return f"{words or 'stream'}-{hashlib.sha256(stream.encode()).hexdigest()[:12]}"


def _outside(field: str, got: str, operator: Operator) -> RequestRefused:
    folders = ", ".join(map(str, operator.allowed))
    return RequestRefused(
        f"init_info: {field} {got!r} lies outside the folders that requests may name ({folders}); the operator can add "
        f"one with {ALLOWED_PATHS}",
        field=field,
        got=got,
    )


def _need(what: str, field: str, value: object, fits: Any, expected: str) -> None:
    if not fits(value):
        raise RequestRefused(
            f"{what}: {field} is {value!r}; expected {expected}", field=field, expected=expected, got=str(value)
        )


def _is_text_or_none(value: object) -> bool:
    return value is None or (isinstance(value, str) and value != "")


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _is_version(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53
