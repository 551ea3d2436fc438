"""The checkpoint a stream starts from: a folder or a Hub id, its tensors, its digests, the files beside the weights.

Only the rule that Hugging Face libraries follow counts as weights: `model.safetensors` if there is one, else the files
its index names, else every `*.safetensors` file.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_delta.errors import BaseMismatch, CaptureError, FormatError, StoreUnavailable
from torch_delta.format.schema import Schema, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch_delta.capture.source import Bits

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_HUB_PATTERNS = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
_HUB_IGNORED = ["*/*"]  # other formats and adapters live in subfolders
_SMALL_FILES = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken", ".py"})
_MAX_SMALL_BYTES = 256 << 20
_SHOWN = 8


@dataclass(frozen=True)
class BaseCheckpoint:
    """A checkpoint folder on this machine.

    Attributes:
        path: the folder.
        kind: ``"hf"`` if it came from the Hub, else ``"local"``.
        name: the Hub id, or the folder's name.
        revision: commit of the Hub snapshot, or None.
        files: weight file of every tensor, by name.
        schema: names, dtypes and shapes, without knowledge of ties.
    """

    path: Path
    kind: str
    name: str
    revision: str | None
    files: Mapping[str, str]
    schema: Schema

    def bits(self, names: Iterable[str]) -> Iterator[tuple[str, Bits]]:
        """Bits of some tensors, flat and unsigned, each read when asked for; valid until the iterator advances."""
        import torch
        from safetensors import safe_open

        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self.files[name], []).append(name)
        for file, inside in by_file.items():
            with safe_open(self.path / file, framework="pt") as opened:
                for name in inside:
                    tensor = opened.get_tensor(name).reshape(-1)
                    width = tensor.element_size()
                    array: Any = tensor.view(integers[width]).numpy()
                    yield name, array.view(f"<u{width}")

    def small_files(self) -> list[Path]:
        """What `from_pretrained` needs beside the weights (config, tokenizer), sorted; not the index of the weights."""
        return sorted(
            path
            for path in self.path.iterdir()
            if path.suffix in _SMALL_FILES
            and path.is_file()
            and not path.name.startswith(".")
            and not path.name.endswith(".safetensors.index.json")
            and path.stat().st_size <= _MAX_SMALL_BYTES
        )

    def check_fits(self, schema: Schema) -> None:
        """Compare names, dtypes and shapes with what a source publishes.

        Raises:
            BaseMismatch: they differ; names the tensors.
        """
        problems: dict[str, str] = {}
        ours = {spec.name: spec for spec in schema.tensors}
        for spec in self.schema.tensors:
            mine = ours.get(spec.name)
            if mine is None:
                problems[spec.name] = "only in the base"
            elif (mine.dtype, tuple(mine.shape)) != (spec.dtype, tuple(spec.shape)):
                problems[spec.name] = (
                    f"{spec.dtype} {list(spec.shape)} in the base, {mine.dtype} {list(mine.shape)} in the source"
                )
        for spec in schema.tensors:
            if spec.name not in self.files and spec.alias_of is None:
                problems[spec.name] = "not in the base"
        if problems:
            raise BaseMismatch(
                f"the tensors differ from the base {self.name}: {_some(problems)}; give the checkpoint this model was "
                "loaded from",
                tensors=list(problems)[:100],
            )


def open_base(base: str | Path) -> BaseCheckpoint:
    """Find a base and read its headers; a Hub id is downloaded, or taken from the cache when offline.

    Raises:
        StoreUnavailable: it is not there, or could not be downloaded.
        FormatError: not a checkpoint folder, or a damaged one.
        CaptureError: its weights are quantised.
    """
    path, kind, revision = _locate(base)
    files: dict[str, str] = {}
    specs: list[TensorSpec] = []
    for file in _weight_files(path):
        for spec in _headers(path / file):
            if spec.name in files:
                raise FormatError(f"{path}: tensor {spec.name!r} is in {files[spec.name]} and in {file}", key=file)
            files[spec.name] = file
            specs.append(spec)
    name = str(base) if kind == "hf" else path.name
    _refuse_quantised(path, name)
    schema = Schema(tuple(sorted(specs, key=lambda spec: spec.name.encode())))
    return BaseCheckpoint(path, kind, name, revision, files, schema)


def _locate(base: str | Path) -> tuple[Path, str, str | None]:
    path = Path(base)
    if path.is_dir():
        return path.resolve(), "local", None
    if isinstance(base, Path) or not _HUB_ID.fullmatch(base):
        raise StoreUnavailable(
            f"base {str(base)!r}: no such folder; expected a checkpoint folder with *.safetensors, or a Hub id such as "
            "'Qwen/Qwen3-8B'",
            path=str(base),
        )
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(base, allow_patterns=_HUB_PATTERNS, ignore_patterns=_HUB_IGNORED))
    except Exception as error:
        raise StoreUnavailable(
            f"base {base!r} is neither a folder here nor available from the Hub ({type(error).__name__}: {error}); "
            "download it first, or give a path",
            path=base,
        ) from error
    return folder, "hf", folder.name


def _weight_files(path: Path) -> list[str]:
    names = sorted(entry.name for entry in path.iterdir() if entry.is_file())
    if _SINGLE in names:
        return [_SINGLE]
    if _INDEX in names:
        try:
            files = sorted(set(json.loads((path / _INDEX).read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(f'{path / _INDEX}: not an index with a "weight_map"', key=_INDEX) from error
        missing = [file for file in files if file not in names]
        if missing:
            raise FormatError(f"{path / _INDEX} names {missing[0]!r}, which is not in the folder", key=_INDEX)
        return files
    found = [name for name in names if name.endswith(".safetensors") and not name.startswith(".")]
    if not found:
        raise FormatError(
            f"{path} holds no *.safetensors file; expected a checkpoint folder (convert it first)", key=str(path)
        )
    return found


def _headers(file: Path) -> Iterator[TensorSpec]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                view = opened.get_slice(name)
                yield TensorSpec(name=name, dtype=view.get_dtype(), shape=tuple(view.get_shape()))
    except SafetensorError as error:
        raise FormatError(f"{file}: damaged safetensors file: {error}", key=file.name) from error


def _refuse_quantised(path: Path, name: str) -> None:
    """The configuration says so before any name does; capture looks at the names."""
    config = path / "config.json"
    try:
        settings = json.loads(config.read_bytes()) if config.is_file() else {}
    except ValueError as error:
        raise FormatError(f"{config}: not JSON", key=config.name) from error
    for place in (settings, settings.get("text_config") or {}) if isinstance(settings, dict) else ():
        if isinstance(place, dict) and place.get("quantization_config"):
            method = place["quantization_config"].get("quant_method", "?")
            raise CaptureError(
                f"the base {name} is quantised (config.json: quantization_config, {method}); a trainer's weights cast "
                "to its dtype are not its weights. Use an unquantised base",
                base=name,
            )


def _some(problems: Mapping[str, str]) -> str:
    shown = "; ".join(f"{name}: {what}" for name, what in list(problems.items())[:_SHOWN])
    return shown + (f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else "")
