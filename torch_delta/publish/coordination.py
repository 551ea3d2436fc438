"""How ranks agree: gather, decide on rank 0, tell everybody, without a collective and with a deadline on every wait.

One broadcast when attaching gives all ranks the same random name, under which every key of this publisher lives; from
then on `Team.agree` does at attach and for anchors what a gather and a broadcast would do, except that a rank that
fails or never answers is named to all the others instead of leaving them in a collective.
"""

from __future__ import annotations

import json
import time
import uuid
from typing import TYPE_CHECKING

from torch_delta import errors
from torch_delta.errors import DeadlineExceeded, TorchDeltaError
from torch_delta.publish.keyvalue import (
    KeyValue,
    LocalKeyValue,
    PrefixedKeyValue,
    TorchKeyValue,
    await_value,
    delete_blob,
    put_blob,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed import ProcessGroup

_MAX_MESSAGE = 2000


class Team:
    """The ranks that publish together.

    Args:
        rank: of this process among them.
        world_size: how many they are.
        kv: shared by all of them and by nobody else.
    """

    def __init__(self, rank: int, world_size: int, kv: KeyValue) -> None:
        self.rank = rank
        self.world_size = world_size
        self.kv = kv
        self._round = 0

    @property
    def is_coordinator(self) -> bool:
        """Rank 0: the one that decides and commits."""
        return self.rank == 0

    def apart(self, name: str) -> Team:
        """The same ranks for another thread of each, whose agreements are none of this one's business.

        Args:
            name: the same on every rank; once per team.
        """
        return Team(self.rank, self.world_size, PrefixedKeyValue(self.kv, f"{name}/"))

    def agree(
        self,
        phase: str,
        local: Callable[[], bytes],
        decide: Callable[[list[bytes]], bytes],
        *,
        timeout_s: float,
    ) -> bytes:
        """Gather, decide on rank 0, tell everybody; fail on all ranks or on none.

        Called by every rank, in the same order as every other `agree`, on the training thread, outside training steps.

        Args:
            phase: named in errors.
            local: this rank's contribution; what it raises, all ranks raise.
            decide: runs on rank 0 with the contributions in rank order; what it raises, all ranks raise.
            timeout_s: seconds rank 0 waits for the contributions, and others for it beyond that.

        Returns:
            What `decide` returned, on every rank.

        Raises:
            TorchDeltaError: of the class that the lowest failing rank raised, with `.failures` by rank.
        """
        self._round += 1
        key = f"agree/{self._round}"
        cause: BaseException | None = None
        try:
            mine = b"\x00" + local()
        except Exception as error:
            cause = error
            mine = b"\x01" + pack_error(error)
        if self.is_coordinator:
            verdict = self._decide(phase, key, mine, decide, timeout_s)
            put_blob(self.kv, f"{key}/verdict", verdict)
        else:
            put_blob(self.kv, f"{key}/{self.rank}", mine)
            # The coordinator may still be within its own deadline, and then needs some time to decide.
            verdict = await_value(
                self.kv, f"{key}/verdict", timeout_s=2 * timeout_s, phase=phase, peer="rank 0 (coordinator)"
            )
        if verdict[0] == 0:
            return verdict[1:]
        raise unpack_error(verdict[1:]) from cause

    def _decide(
        self, phase: str, key: str, mine: bytes, decide: Callable[[list[bytes]], bytes], timeout_s: float
    ) -> bytes:
        deadline = time.monotonic() + timeout_s
        heard = {0: mine}
        failures: dict[int, TorchDeltaError] = {}
        for rank in range(1, self.world_size):
            try:
                left_s = max(deadline - time.monotonic(), 0.0)
                heard[rank] = await_value(self.kv, f"{key}/{rank}", timeout_s=left_s, phase=phase, peer=f"rank {rank}")
                delete_blob(self.kv, f"{key}/{rank}", len(heard[rank]))
            except DeadlineExceeded as error:
                failures[rank] = error
        if self._round > 1:
            # Whoever contributed to this round has read the verdict of the previous one.
            self.kv.delete(f"agree/{self._round - 1}/verdict")
        for rank, said in heard.items():
            if said[0] != 0:
                failures[rank] = unpack_error(said[1:])
        if failures:
            return b"\x01" + pack_error(joint_error(phase, failures))
        try:
            return b"\x00" + decide([heard[rank][1:] for rank in range(self.world_size)])
        except Exception as error:
            return b"\x01" + pack_error(error)


def joint_error(phase: str, failures: Mapping[int, TorchDeltaError]) -> TorchDeltaError:
    """One error for all ranks out of the errors of some: class and facts of the lowest rank's, all messages by rank."""
    first = min(failures)
    error = failures[first]
    others = f" (and {len(failures) - 1} more of {len(failures)} failing ranks)" if len(failures) > 1 else ""
    facts = {**error.facts, "failures": {rank: failures[rank].message for rank in sorted(failures)}}
    return type(error)(f"{phase}: rank {first}: {error.message}{others}", **facts)


def pack_error(error: BaseException) -> bytes:
    """An error as JSON: no pickle crosses ranks."""
    if isinstance(error, TorchDeltaError):
        facts = {name: value for name, value in error.facts.items() if _is_plain(value)}
        said: dict[str, object] = {"class": type(error).__name__, "message": error.message[:_MAX_MESSAGE]}
        failures = facts.pop("failures", None)
        if isinstance(failures, dict):
            said["failures"] = {str(rank): str(text)[:_MAX_MESSAGE] for rank, text in failures.items()}
        said["facts"] = facts
    else:
        said = {"class": "TorchDeltaError", "message": f"{type(error).__name__}: {error}"[:_MAX_MESSAGE], "facts": {}}
    return json.dumps(said).encode()


def unpack_error(data: bytes) -> TorchDeltaError:
    """The error `pack_error` wrote."""
    said = json.loads(data)
    kind = getattr(errors, said["class"], TorchDeltaError)
    facts = dict(said["facts"])
    if "failures" in said:
        # By rank, or by whatever else failed (URLs of servers); JSON knows only strings.
        facts["failures"] = {int(key) if key.isdecimal() else key: text for key, text in said["failures"].items()}
    error = kind(said["message"], **facts)
    assert isinstance(error, TorchDeltaError)
    return error


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= 100 and all(_is_plain(item) for item in value)
    return isinstance(value, str | int | float | bool | dict) or value is None


def form_team(group: ProcessGroup | None = None) -> Team:
    """The ranks of a process group, or this process alone when torch.distributed is not in use.

    A collective: one small broadcast, so that two publishers of one job never share keys.

    Args:
        group: the ranks that hold the model between them; None is every rank of the job.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return Team(0, 1, LocalKeyValue())
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return Team(0, 1, LocalKeyValue())
    name: list[str | None] = [uuid.uuid4().hex]
    dist.broadcast_object_list(name, src=0 if group is None else dist.get_global_rank(group, 0), group=group)
    from torch.distributed.distributed_c10d import _get_default_store

    return Team(dist.get_rank(group), world_size, TorchKeyValue(_get_default_store(), f"torch_delta/{name[0]}"))
