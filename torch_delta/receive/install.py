"""Moving a whole set of files into a working copy so that any crash ends with all of them or with none.

A stage folder is filled and synced; then `install.json` is written, and from that moment the move happens: whoever
opens the checkpoint next finishes it. Bases are installed like this once, anchors whenever a follower starts from one.
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from torch_delta.crashpoints import reach
from torch_delta.errors import FormatError
from torch_delta.format.sealed import seal, unseal
from torch_delta.receive.diskio import copy_file, local_io, replace_synced, sync_dir, write_synced
from torch_delta.receive.folder import weight_files
from torch_delta.receive.state import HIDDEN, Layout, State

if TYPE_CHECKING:
    from collections.abc import Iterable

_STATE, _SCHEMA = ".state.json", ".schema.json"
# Other copies of the same weights: left out, because nothing would ever update them.
_FOREIGN_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack", ".ot"}


class Stage:
    """A folder being filled with the files of a checkpoint.

    Args:
        layout: of the checkpoint they will move into; the caller holds its writer lock.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.path = layout.hidden / f"stage-{secrets.token_hex(8)}"
        self.shared_extents = False
        with local_io(self.path, "prepare a folder for incoming files"):
            self.path.mkdir(parents=True)

    def copy_base(self, base: Path) -> None:
        """Copy every file of the checkpoint folder `base` that a loader may need; `base` is only read."""
        weights = set(weight_files(base))
        for source in sorted(_files_under(base)):
            name = source.relative_to(base)
            if name.suffix in _FOREIGN_WEIGHTS and str(name) not in weights:
                continue
            if (
                name.name.endswith(".index.json")
                and len(weights) == 1
                and not name.name.startswith("model.safetensors")
            ):
                continue
            target = self.path / name
            with local_io(target, f"copy {source}"):
                target.parent.mkdir(parents=True, exist_ok=True)
                self.shared_extents |= copy_file(source, target)
            reach("receive.file_copied")

    def install(self, state: State, schema: bytes | None) -> None:
        """Move everything into place and make `state` current; from the first line on, a crash only delays it.

        The caller holds the writer lock and the exclusive weights lock.
        """
        layout = self._layout
        files = sorted(str(path.relative_to(self.path)) for path in _files_under(self.path))
        with local_io(layout.root, "move incoming files into place"):
            write_synced(self.path / _STATE, [state.to_bytes()])
            if schema is not None:
                write_synced(self.path / _SCHEMA, [schema])
            for folder, _, _ in os.walk(self.path):
                sync_dir(Path(folder))
            temporary = layout.install.with_suffix(".new")
            write_synced(temporary, [seal({"stage": self.path.name, "files": files})])
            reach("receive.install_staged")
            replace_synced(temporary, layout.install)
            reach("receive.install_begun")
            finish_install(layout)

    def discard(self) -> None:
        """Remove the folder and what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)


def finish_install(layout: Layout) -> None:
    """Finish a move that was begun; safe to call again after a crash inside it. Same locks as `Stage.install`."""
    record = unseal(layout.install.read_bytes(), key=str(layout.install))
    stage_name, files = record.get("stage"), record.get("files")
    if not isinstance(stage_name, str) or not stage_name.startswith("stage-") or not isinstance(files, list):
        raise FormatError(
            f"{layout.install}: not an install record; remove {layout.root} and start again", key="install.json"
        )
    stage = layout.hidden / stage_name
    folders = {layout.root}
    for name in files:
        source, target = stage / name, layout.root / name
        if source.exists():
            for parent in reversed(target.relative_to(layout.root).parents[:-1]):
                (layout.root / parent).mkdir(exist_ok=True)
                folders.add(layout.root / parent)
            source.replace(target)
            reach("receive.install_file")
    _remove_stale_weights(layout.root, set(files))
    for folder in folders:
        sync_dir(folder)
    # Patches and half-made states of the old files lead nowhere now; a consumer that misses one reloads.
    layout.next.unlink(missing_ok=True)
    for patch in _entries(layout.patches):
        patch.unlink(missing_ok=True)
    for staged, target in ((stage / _SCHEMA, layout.schema), (stage / _STATE, layout.state)):
        if staged.exists():
            replace_synced(staged, target)
            reach("receive.install_state")
    layout.install.unlink()
    sync_dir(layout.hidden)
    shutil.rmtree(stage, ignore_errors=True)


def _remove_stale_weights(root: Path, keep: set[str]) -> None:
    for path in _entries(root):
        if path.name not in keep and path.name.endswith((".safetensors", ".safetensors.index.json")):
            path.unlink()


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def _files_under(root: Path) -> Iterable[Path]:
    """Files below `root`, links followed, hidden folders (`.git`, `.cache`, ours) left out."""
    for folder, folders, files in os.walk(root, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if name not in {_STATE, _SCHEMA}:
                yield Path(folder, name)


def has_leftovers(layout: Layout) -> bool:
    """Whether there is unfinished work, of a dead process or of a live writer."""
    return any(_is_unfinished(path) for path in _entries(layout.hidden)) or bool(_entries(layout.tmp))


def sweep(layout: Layout) -> None:
    """Remove what dead processes left unfinished (F84); the caller holds the writer lock, and nothing is half moved."""
    for path in _entries(layout.hidden):
        if path.name.startswith("stage-"):
            shutil.rmtree(path, ignore_errors=True)
        elif _is_unfinished(path):
            path.unlink(missing_ok=True)
    for path in _entries(layout.tmp):
        path.unlink(missing_ok=True)


def _is_unfinished(path: Path) -> bool:
    return path.name.startswith("stage-") or path.suffix == ".new"


assert HIDDEN.startswith("."), "the walk over a base must not descend into another checkpoint's hidden folder"
