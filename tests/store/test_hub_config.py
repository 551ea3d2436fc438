"""URLs, endpoints, tokens and limits of the Hub store, and what happens to it in a forked process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import torch_delta
from tests.store.hubs import raw_get, raw_put, split
from torch_delta.errors import TorchDeltaError
from torch_delta.store import open_store
from torch_delta.store.hub import HubStore
from torch_delta.store.hub_batch import Batcher
from torch_delta.store.hub_config import HubConfig
from torch_delta.store.hub_xet import Content

pytestmark = pytest.mark.usefixtures("hub_home")

COMMIT = "commits/00000000000000000001.json"


@pytest.mark.parametrize(
    ("url", "canonical"),
    [
        ("hf://buckets/me/run", "hf://buckets/me/run"),
        ("HF://buckets/me/run/", "hf://buckets/me/run"),
        ("hf://buckets/Org-1/run.2/a/b=c_1.x/", "hf://buckets/Org-1/run.2/a/b=c_1.x"),
    ],
)
def test_urls(url, canonical) -> None:
    with open_store(url) as store:
        assert isinstance(store, HubStore)
        assert store.url == canonical


@pytest.mark.parametrize(
    "url",
    ["hf://", "hf://me/run", "hf://models/me/run", "hf://datasets/me/run/x", "hf://buckets/me", "hf://buckets/me//x",
     "hf://buckets/me/run//x", "hf://buckets/me/run/../x", "hf://buckets/me/run/.x", "hf://buckets/me/run/a?b",
     "hf://buckets/me/run/a b", "hf://buckets/.me/run"],
)  # fmt: skip
def test_malformed_urls(url) -> None:
    with pytest.raises(TorchDeltaError, match=r"expected hf://buckets/owner/name/prefix"):
        open_store(url)


def test_secrets_in_a_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(TorchDeltaError, match="HF_TOKEN") as caught:
        open_store("hf://buckets/me:hunter2@x/run")
    assert "hunter2" not in str(caught.value)


def test_the_token_goes_encrypted_or_to_this_machine_only(monkeypatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://10.0.0.1:8000")
    with pytest.raises(TorchDeltaError, match="unencrypted"):
        open_store("hf://buckets/me/run")
    HubStore("hf://buckets/me/run", config=HubConfig(allow_http=True)).close()
    HubStore("hf://buckets/me/run", config=HubConfig(endpoint="https://hub.example")).close()
    monkeypatch.setenv("HF_ENDPOINT", "https://user:secret@hub.example")
    with pytest.raises(TorchDeltaError, match="HF_ENDPOINT") as caught:
        open_store("hf://buckets/me/run")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "wrong", [{"stall_timeout_s": 0}, {"operation_timeout_s": -1}, {"claim_timeout_s": 0}, {"chunk_bytes": 0}]
)
def test_limits_that_cannot_work_are_refused(wrong) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        HubConfig(**wrong)


def test_a_missing_extra_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "hf_xet", None)
    with pytest.raises(TorchDeltaError, match=r"pip install 'torch-delta\[hub\]'"):
        open_store("hf://buckets/me/run")


def test_the_token_is_read_for_each_request(hub, hub_url, monkeypatch) -> None:
    hub.tokens.clear()
    raw_put(hub, hub_url, COMMIT, b"x")
    with open_store(hub_url) as store:
        store.stat(COMMIT)
        monkeypatch.setenv("HF_TOKEN", "hf_renewed")
        store.stat(COMMIT)
    assert hub.tokens == {"Bearer hf_dummy", "Bearer hf_renewed"}


def test_the_token_of_a_login_is_found(hub, hub_url, tmp_path) -> None:
    hub.tokens.clear()
    raw_put(hub, hub_url, COMMIT, b"from the hub")
    (tmp_path / "hf-home").mkdir()
    (tmp_path / "hf-home" / "token").write_text("hf_from_login")
    code = f"from torch_delta.store import open_store; print(open_store({hub_url!r}).get({COMMIT!r}))"
    environment = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}
    environment["HF_HOME"] = str(tmp_path / "hf-home")
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout == "b'from the hub'\n"
    assert hub.requests[-1].startswith("GET /buckets/")


def test_the_content_store_never_sees_the_hubs_token(hub, hub_url) -> None:
    with open_store(hub_url) as store:
        store.put_new(COMMIT, b"x")
    assert hub.content_tokens <= {"Bearer content-token", None}
    assert "Bearer content-token" in hub.content_tokens


FORKED = """
import os, sys, warnings
from torch_delta.errors import StoreUnavailable
from torch_delta.store import open_store
warnings.simplefilter("ignore")
url, key = sys.argv[1:]
store = open_store(url)
store.put_new(key, bytes(9 << 20))  # hf-xet has started
child = os.fork()
if child == 0:
    try:
        store.get(key)
    except StoreUnavailable as error:
        assert "forked" in str(error) and "spawn" in str(error), error
        os._exit(0 if len(open_store(url).get(key)) == 9 << 20 else 2)
    os._exit(1)
_, status = os.waitpid(child, 0)
assert len(store.get(key)) == 9 << 20  # the parent goes on
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_store_that_was_used_before_a_fork_refuses_to_work_after_it(hub, hub_url) -> None:  # F79
    script = [sys.executable, "-c", FORKED, hub_url, "parts/x.safetensors"]
    found = subprocess.run(script, capture_output=True, text=True, timeout=120, check=False)
    assert (found.returncode, found.stderr) == (0, "")


def test_nothing_in_the_package_forks() -> None:  # F79
    package = Path(torch_delta.__file__).parent
    forking = re.compile(r"os\.fork|forkpty|get_context\(|multiprocessing|ProcessPoolExecutor")
    found = {
        str(path.relative_to(package)): line.strip()
        for path in package.rglob("*.py")
        for line in path.read_text().splitlines()
        if forking.search(line) and '"spawn"' not in line
    }
    assert {path: line for path, line in found.items() if not line.startswith(("#", '"'))} == {}
    assert forking.search("pool = multiprocessing.Pool()")  # the search can find something


RACER = """
import sys
from torch_delta.errors import ObjectExists
from torch_delta.store import open_store
store, racer = open_store(sys.argv[1]), sys.argv[2]
print("ready", flush=True)
for line in sys.stdin:                    # the starting gun of each round
    try:
        store.put_new(f"commits/{int(line):020d}.json", (racer * 5000).encode())
        print("won", flush=True)
    except ObjectExists:
        print("lost", flush=True)
"""


def test_of_many_processes_exactly_one_creates(hub, hub_url) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    racers = [subprocess.Popen([sys.executable, "-c", RACER, hub_url, str(number)], **pipes) for number in range(3)]
    try:
        assert [racer.stdout.readline() for racer in racers] == ["ready\n"] * 3
        for version in range(5):
            for racer in racers:
                racer.stdin.write(f"{version}\n")
                racer.stdin.flush()
            outcomes = [racer.stdout.readline().strip() for racer in racers]
            assert sorted(outcomes) == ["lost", "lost", "won"], outcomes
            assert raw_get(hub, hub_url, f"commits/{version:020d}.json") == str(outcomes.index("won")).encode() * 5000
    finally:
        for racer in racers:
            racer.stdin.close()
            racer.stdout.close()
            racer.wait(60)
    assert [racer.returncode for racer in racers] == [0, 0, 0]
    assert not any(".claims" in path for path in hub.buckets[split(hub_url)[0]])


class OneAtATime:
    """Stands for the Hub: the first batch is under way until the test says so."""

    def __init__(self) -> None:
        self.entered, self.gate = threading.Event(), threading.Event()
        self.batches: list[list[str]] = []

    def batch(self, operations):
        self.batches.append([operation["path"] for operation in operations])
        self.entered.set()
        assert self.gate.wait(60)
        return {operation["path"]: "broken" for operation in operations if operation["path"].endswith("3")}


def test_writes_that_arrive_together_travel_together() -> None:
    client = OneAtATime()
    batcher, content = Batcher(client, 60.0), Content("0" * 64, 0)
    with ThreadPoolExecutor(6) as pool:
        first = pool.submit(batcher.add, "part-0", content)
        assert client.entered.wait(60)
        others = [pool.submit(batcher.add, f"part-{number}", content) for number in range(1, 6)]
        while len(batcher._waiting) < 5:
            client.entered.wait(0.01)
        client.gate.set()
        assert first.result(60) is None
        assert [other.result(60) for other in others] == [None, None, "broken", None, None]
    assert [len(batch) for batch in client.batches] == [1, 5]
    assert sorted(client.batches[1]) == [f"part-{number}" for number in range(1, 6)]


def test_the_next_batch_is_sent_although_the_first_one_failed(hub, hub_url) -> None:
    from tests.store.fake_hub import HubFault

    fault = hub.add(HubFault("/batch", status=503, num_times=2))
    with open_store(hub_url) as store, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: store.put_new(f"parts/{number:016x}", [b"x"]), range(8)))
    assert fault.num_fired == 2
    assert all(raw_get(hub, hub_url, f"parts/{number:016x}") == b"x" for number in range(8))
