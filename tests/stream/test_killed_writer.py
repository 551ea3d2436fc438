"""A writer that is killed at every crash point of the stream and of the directory store below it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.stream.samples import SCHEMA, make_commit, make_info
from torch_delta import crashpoints
from torch_delta.errors import ObjectNotFound
from torch_delta.store import LocalStore
from torch_delta.stream import Stream

WRITER = """
import sys
from tests.stream.samples import SCHEMA, make_commit, make_info
from torch_delta.store import LocalStore
from torch_delta.stream import Stream
stream = Stream(LocalStore(sys.argv[1]))
stream.create(make_info(), SCHEMA)
sha256 = stream.write_commit(make_commit(1, stream.info_sha256))
stream.write_head(1, sha256)
"""

# The third put_new is the commit's; the first two are those of the schema and of stream.json.
CASES = [
    ("store.temp_written:1", None),
    ("store.linked:1", None),
    ("stream.schema_written:1", None),
    ("store.temp_synced:2", None),
    ("store.linked:2", 0),
    ("stream.info_written:1", 0),
    ("store.temp_created:3", 0),
    ("store.temp_written:3", 0),
    ("store.temp_synced:3", 0),
    ("store.linked:3", 1),
    ("store.temp_removed:3", 1),
    ("store.directory_synced:3", 1),
    ("stream.commit_written:1", 1),
    ("store.hint_written:1", 1),
    ("store.hint_renamed:1", 1),
    ("stream.head_written:1", 1),
]


@pytest.mark.parametrize(("crash", "version"), CASES)
def test_nothing_committed_is_lost_and_nothing_else_is_seen(tmp_path, crash, version) -> None:
    environment = {**os.environ, crashpoints.ENVIRONMENT: f"{crash}:kill", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == -signal.SIGKILL, run.stderr

    reader = Stream(LocalStore(tmp_path))
    if version is None:
        with pytest.raises(ObjectNotFound):
            reader.head()
    else:
        assert reader.head() == version
        assert [item.commit.version for item in reader.commits(1, version)] == [*range(1, version + 1)]

    # The writer, started again, does the same and ends where it would have.
    again = Stream(LocalStore(tmp_path))
    again.create(make_info(), SCHEMA)
    sha256 = again.write_commit(make_commit(1, again.info_sha256))
    again.write_head(1, sha256)
    assert Stream(LocalStore(tmp_path)).commit(1) == (make_commit(1, again.info_sha256), sha256)
