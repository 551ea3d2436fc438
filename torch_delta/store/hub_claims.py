"""Creating an object exclusively where the Hub has no precondition: claims, in the manner of a bakery's queue.

A writer of ``commits/7.json`` first adds the claim ``.claims/commits/7.json/<nonce>`` and then lists the claims of that
name. Only a writer that sees its own claim *and no other* may go on: it looks whether the object exists, adds it, reads
it back, and only then removes its claim. One that sees others waits if its nonce is the lowest, and otherwise removes
its claim and waits for the object to appear or the others to go.

Why at most one wins, if the Hub's listing shows what was added before it began: of two claims one was added first, and
the later writer's listing came after both. It shows the earlier claim, so that the later writer stops, unless the
earlier writer has removed it; then the object was visible before, and the later writer finds it.

A dead writer's claim would block a name for ever, so a claim that stays unchanged for `claim_timeout_s` counts as dead
and is removed. A writer starts no request that adds the object after half of that, and waits for none longer than the
other half. This is where the proof ends: a request that the network or the Hub holds back for longer can still land.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from typing import TYPE_CHECKING, Final

from torch_delta.errors import ObjectExists, StoreUnavailable
from torch_delta.store.calls import Answer
from torch_delta.store.hub_replies import HubTrouble

if TYPE_CHECKING:
    from torch_delta.store.calls import Call
    from torch_delta.store.hub_batch import Batcher
    from torch_delta.store.hub_config import HubConfig
    from torch_delta.store.hub_http import HubClient
    from torch_delta.store.hub_replies import HubFile
    from torch_delta.store.hub_xet import Content

CLAIMS: Final = ".claims/"  # no key starts with a dot, so no listing of objects shows them
_WAITING = Answer("unclear", "another writer's claim of the name is in the way", "Repeat; it expires", None)
_RAN_OUT = Answer("unclear", "the claim of the name ran out before the Hub answered", "Repeat to find out", None)


class Claims:
    """Exclusive creation. Thread-safe.

    Args:
        client: looks and lists.
        batcher: writes.
        config: limits.
    """

    def __init__(self, client: HubClient, batcher: Batcher, config: HubConfig) -> None:
        self._client = client
        self._batcher = batcher
        self._config = config

    def create(self, call: Call, content: Content) -> HubFile:
        """Give stored content a name that nobody else gets.

        Raises:
            ObjectExists: another writer's object has the name.
            StoreUnavailable: no clear answer.
        """
        first_seen_s: dict[str, float] = {}
        call.outcome = "absent"
        while True:
            claim = f"{self._folder(call)}/{secrets.token_hex(16)}"
            begin_s = time.monotonic()
            try:
                created = self._try(call, content, claim, begin_s, first_seen_s)
            except ObjectExists:
                self._remove(claim)
                raise
            except StoreUnavailable:
                # If the object may still appear, the claim stays: until it expires it keeps others from creating what
                # a late request of ours would overwrite.
                if call.outcome == "absent":
                    self._remove(claim)
                raise
            self._remove(claim)
            if created is not None:
                return created
            call.wait(None, _WAITING)  # not the lowest, or too slow: begin anew
            if self.look(call) is not None:
                raise call.exists()

    def look(self, call: Call) -> HubFile | None:
        """What has the name."""
        path = self._client.location.path(call.key)
        return call.repeat(lambda: self._client.look([path])).get(path)

    def put(self, call: Call, content: Content, *, add_until_s: float = float("inf")) -> HubFile:
        """Give stored content a name, and read back that it has it (F76).

        Args:
            call: the put.
            content: to be named.
            add_until_s: no request that adds starts later than this on the monotonic clock: the claim is no longer
                good then, and all that may be done is to look.

        Raises:
            ObjectExists: the name leads to other bytes afterwards: another writer overwrote ours.
            StoreUnavailable: it did not happen, or no clear answer.
        """
        path = self._client.location.path(call.key)
        call.outcome = "unknown"
        is_added = False
        while True:
            call.start_attempt()
            error: HubTrouble | None = None
            answer = Answer("unclear", "it was added, and is not there", "Repeat", None)
            may_add = time.monotonic() < add_until_s
            if not is_added and may_add:
                try:
                    failure = self._batcher.add(path, content)
                except HubTrouble as trouble:
                    if trouble.answer.kind != "unclear":
                        raise call.unavailable(trouble.answer, outcome="absent") from trouble
                    error, answer = trouble, trouble.answer
                else:
                    is_added = failure is None
                    if failure is not None:
                        answer = Answer("unclear", f"the Hub did not add it: {failure}", "Repeat", None)
            with contextlib.suppress(HubTrouble):
                found = self._client.look([path]).get(path)
                if found is not None and (found.content, found.size_bytes) == (content.hash, content.size_bytes):
                    return found
                if found is not None:  # nothing was there before, so another writer named it in the meantime
                    raise call.exists()
                if not is_added and not may_add:
                    raise call.unavailable(_RAN_OUT)
            call.wait(error, answer)

    def _try(
        self, call: Call, content: Content, claim: str, begin_s: float, first_seen_s: dict[str, float]
    ) -> HubFile | None:
        """One claim up to its end; None if it must be given up and another one made."""
        taken = call.repeat(lambda: self._batcher.add(claim, content))
        if taken is not None:
            call.wait(None, Answer("unclear", f"the Hub did not add a claim: {taken}", "Repeat", None))
            return None
        good_until_s = begin_s + self._config.claim_timeout_s / 2
        while time.monotonic() < good_until_s:
            claims = call.repeat(lambda: self._claims(call))
            others = self._living(claims - {claim}, first_seen_s)
            if claim in claims and not others:
                if self.look(call) is not None:
                    raise call.exists()
                if time.monotonic() >= good_until_s:
                    return None
                return self.put(call, content, add_until_s=good_until_s)
            if others and min(others) < claim:
                return None
            call.wait(None, _WAITING)
        return None

    def _living(self, claims: set[str], first_seen_s: dict[str, float]) -> set[str]:
        """Those of other writers' claims that may still be used; the others are removed.

        By this process's clock alone, from when it saw a claim first: no clocks of other hosts are compared.
        """
        now_s = time.monotonic()
        oldest_s = now_s - self._config.claim_timeout_s
        dead = {claim for claim in claims if first_seen_s.setdefault(claim, now_s) < oldest_s}
        for claim in dead:
            self._remove(claim)
        return claims - dead

    def _claims(self, call: Call) -> set[str]:
        folder = self._folder(call)
        return {
            file.path for files, _ in self._client.pages(folder) for file in files if file.path.startswith(f"{folder}/")
        }

    def _folder(self, call: Call) -> str:
        return self._client.location.path(f"{CLAIMS}{call.key}")

    def _remove(self, claim: str) -> None:
        """Best effort: what stays counts as dead after a while, and `sweep_temporary` finds it."""
        with contextlib.suppress(HubTrouble):
            self._batcher.delete(claim)
