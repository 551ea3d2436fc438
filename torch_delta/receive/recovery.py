"""What the next writer does about a dead one: finish what was begun, forget what was not."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch_delta.errors import BaseMismatch, DigestMismatch, FormatError
from torch_delta.receive.access import exclusive, needs_replay
from torch_delta.receive.diskio import local_io
from torch_delta.receive.install import finish_install, sweep
from torch_delta.receive.patches import file_hash, open_patch
from torch_delta.receive.retention import drop_patches_above, redo_log
from torch_delta.receive.state import State

if TYPE_CHECKING:
    from torch_delta.receive.patches import Patch
    from torch_delta.receive.session import Session

logger = logging.getLogger("torch_delta")


def recover(session: Session) -> None:
    """Make the checkpoint whole (rule R8); called with the writer lock held, before anything else is done."""
    layout = session.layout
    if layout.install.exists():
        with local_io(layout.root, "finish moving files into place"), exclusive(layout, session.timeout_s):
            finish_install(layout)
    sweep(layout)
    if layout.next.exists():
        _finish_version(session)
    state = session.state
    if state is None:
        return
    if needs_replay(state):
        _replay(session, state)
    drop_patches_above(layout, state.version)


def _finish_version(session: Session) -> None:
    """A writer died between saying which version it writes and having written it: write it again."""
    layout = session.layout
    try:
        with local_io(layout.root, "finish a half-written version"):
            target = State.from_bytes(layout.next.read_bytes(), layout.next)
            patch = _open_patch(session, target.version, _since(target), target.patch_hash)
            with exclusive(layout, session.timeout_s):
                session.write(patch)
                layout.next.replace(layout.state)
    except (FormatError, BaseMismatch) as error:
        session.mark_damaged(f"version was half written and its patch cannot be used: {error}")
    else:
        logger.warning("%s: finished version %d that a process left half written", layout.root, target.version)


def _replay(session: Session, state: State) -> None:
    """The machine restarted: write the patches again that may not have reached the disk, then read everything."""
    layout = session.layout
    logger.warning("%s: the machine restarted; writing versions after %d again", layout.root, state.synced_version)
    try:
        with local_io(layout.root, "write versions again"), exclusive(layout, session.timeout_s):
            for kept in redo_log(layout, state.synced_version, state.version):
                session.write(_open_patch(session, kept.version, kept.since))
        session.verify_full()
    except (FormatError, BaseMismatch, DigestMismatch, IndexError) as error:  # IndexError: rot in a patch's positions
        session.mark_damaged(f"the machine restarted and the redo log does not lead back: {error}")
    else:
        session.sync()


def _since(state: State) -> int:
    return state.patch_since if state.patch_since >= 0 else state.version - 1


def _open_patch(session: Session, version: int, since: int, expected_hash: str | None = None) -> Patch:
    path = session.layout.patch(version, since)
    if not path.exists():
        raise FormatError(f"{path}: the patch of version {version} is gone", key=path.name)
    if expected_hash is not None and file_hash(path) != expected_hash:
        raise FormatError(f"{path}: not the patch that was journalled", key=path.name)
    return open_patch(path, session.schema, since=since)
