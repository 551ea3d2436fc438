"""URLs, endpoints, credentials and answers of object stores; nothing here sends a request."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.store.servers import KEY_ID, SECRET, use
from torch_delta.errors import StoreUnavailable, TorchDeltaError
from torch_delta.store import open_store
from torch_delta.store.object import ObjectStore
from torch_delta.store.object_answers import understand
from torch_delta.store.object_config import ObjectConfig

exceptions = pytest.importorskip("obstore.exceptions")

AZURE = {"AZURE_STORAGE_ACCOUNT_NAME": "account", "AZURE_STORAGE_ACCOUNT_KEY": "a2V5"}
KEYS = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}


@pytest.mark.parametrize(
    ("url", "canonical"),
    [
        ("s3://bucket", "s3://bucket"),
        ("S3://bucket/", "s3://bucket"),
        ("s3://bucket/a/b-c_1.x/", "s3://bucket/a/b-c_1.x"),
        ("gs://bucket/run=1", "gs://bucket/run=1"),
        ("az://container/run", "az://container/run"),
    ],
)
def test_urls(url, canonical, monkeypatch) -> None:
    use(monkeypatch, KEYS | AZURE | {"GOOGLE_SKIP_SIGNATURE": "true"})
    with open_store(url) as store:
        assert isinstance(store, ObjectStore)
        assert store.url == canonical
        with open_store(store.url) as again:
            assert again.url == canonical


@pytest.mark.parametrize(
    "url",
    ["s3://", "s3:///x", "s3://b", "s3://bucket//x", "s3://bucket/a/../b", "s3://bucket/.x", "s3://bucket/a?b=c",
     "s3://bucket/a#b", "s3://bucket/a b", "s3://bucket/\u00fc", "gs://bucket/x//"],
)  # fmt: skip
def test_malformed_urls(url, monkeypatch) -> None:
    use(monkeypatch, KEYS)
    with pytest.raises(TorchDeltaError, match=r"expected (s3|gs)://bucket/prefix"):
        open_store(url)


def test_secrets_in_a_url_are_refused_and_not_repeated(monkeypatch) -> None:
    use(monkeypatch, KEYS)
    with pytest.raises(TorchDeltaError, match="environment") as caught:
        open_store("s3://user:hunter2@bucket/x")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9000", "127.8.9.1", "[::1]:9000"])
def test_http_to_this_machine_is_allowed(host, monkeypatch) -> None:
    use(monkeypatch, KEYS | {"AWS_ENDPOINT_URL": f"http://{host}"})
    open_store("s3://bucket/x").close()


def test_http_to_another_machine_needs_consent(monkeypatch) -> None:
    use(monkeypatch, KEYS | {"AWS_ENDPOINT_URL": "http://10.0.0.1:9000"})
    with pytest.raises(TorchDeltaError, match="AWS_ALLOW_HTTP=true"):
        open_store("s3://bucket/x")
    ObjectStore("s3://bucket/x", config=ObjectConfig(allow_http=True)).close()
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    open_store("s3://bucket/x").close()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "ftp://10.0.0.1")
    with pytest.raises(TorchDeltaError, match="https://host"):
        open_store("s3://bucket/x")


def test_an_explicit_endpoint_wins_over_the_environment(monkeypatch) -> None:
    use(monkeypatch, KEYS | {"AWS_ENDPOINT_URL": "http://10.0.0.1:9000"})
    ObjectStore("s3://bucket/x", config=ObjectConfig(endpoint="https://host")).close()


def test_azure_without_an_account_says_what_is_missing(monkeypatch) -> None:
    use(monkeypatch, {})
    with pytest.raises(TorchDeltaError, match=r"(?i)account"):
        open_store("az://container/x")


def test_a_missing_extra_is_named(monkeypatch) -> None:
    use(monkeypatch, KEYS)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(TorchDeltaError, match=r"pip install 'torch-delta\[s3\]'"):
        open_store("s3://bucket/x")


def test_a_profile_without_boto3_is_not_ignored(monkeypatch) -> None:
    use(monkeypatch, {"AWS_PROFILE": "training"})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TorchDeltaError, match="pip install boto3"):
        open_store("s3://bucket/x")
    for name, value in KEYS.items():  # the environment comes first, as in every AWS tool
        monkeypatch.setenv(name, value)
    open_store("s3://bucket/x").close()


PROFILES = """
[default]
aws_access_key_id = nobody
aws_secret_access_key = nothing
[training]
aws_access_key_id = {id}
aws_secret_access_key = {secret}
"""


@pytest.mark.s3
def test_a_profile_is_read_through_boto3(seaweed, monkeypatch, tmp_path) -> None:
    pytest.importorskip("boto3")
    (tmp_path / "credentials").write_text(PROFILES.format(id=KEY_ID, secret=SECRET))
    (tmp_path / "config").write_text("[profile training]\nregion = us-east-1\n[default]\nregion = us-east-1\n")
    files = {
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
        "AWS_ENDPOINT_URL": seaweed.environment["AWS_ENDPOINT_URL"],
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    use(monkeypatch, {**files, "AWS_PROFILE": "training"})
    with open_store(seaweed.fresh_url()) as store:
        store.put_new("head.json", b"x")
        assert store.get("head.json") == b"x"
    use(monkeypatch, files)  # the default profile's keys are wrong
    with open_store(seaweed.fresh_url()) as store, pytest.raises(StoreUnavailable, match="Access is refused"):
        store.get("head.json")
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    with pytest.raises(TorchDeltaError, match="no-such-profile"):
        open_store("s3://bucket/x")


def test_obstore_is_imported_on_first_use_only() -> None:
    code = "import sys, torch_delta.store.url, torch_delta.store.object; print('obstore' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout == "False\n"


@pytest.mark.parametrize(
    "wrong",
    [{"stall_timeout_s": 0}, {"operation_timeout_s": -1}, {"chunk_bytes": 1 << 20}, {"num_parallel": 0},
     {"num_parallel_reads": 0}, {"single_put_bytes": 1}],
)  # fmt: skip
def test_limits_that_cannot_work_are_refused(wrong) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ObjectConfig(**wrong)


@pytest.mark.parametrize(
    ("endpoint", "wanted", "is_unsigned"),
    [
        (None, None, True),
        ("https://storage.example", None, True),
        ("http://127.0.0.1:9", None, True),
        ("http://192.0.2.1:9", None, False),
        (None, "false", False),
        ("http://192.0.2.1:9", "true", True),
    ],
)
def test_a_body_is_hashed_for_the_signature_only_where_nothing_else_guards_it(
    monkeypatch, endpoint, wanted, is_unsigned
) -> None:
    use(monkeypatch, {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_REGION": "us-east-1"})
    monkeypatch.delenv("AWS_UNSIGNED_PAYLOAD", raising=False)
    if wanted is not None:
        monkeypatch.setenv("AWS_UNSIGNED_PAYLOAD", wanted)
    with ObjectStore("s3://bucket/x", config=ObjectConfig(endpoint=endpoint, allow_http=True)) as store:
        said = str(store._client.config.get("unsigned_payload", wanted or "false")).lower()
        assert (said == "true") == is_unsigned


def said(status: int, code: str = "") -> str:
    return f"Error performing PUT http://h/b/k in 1ms - Server returned non-2xx status code: {status} X: {code}"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError(said(404)), "absent"),
        (FileNotFoundError(said(404, "<Code>NoSuchBucket</Code>")), "no bucket"),
        (exceptions.GenericError(said(404, "<Code>ContainerNotFound</Code>")), "no bucket"),
        (exceptions.AlreadyExistsError(said(412)), "taken"),
        (exceptions.AlreadyExistsError(said(409, "<Code>BlobAlreadyExists</Code>")), "taken"),  # Azure
        (exceptions.AlreadyExistsError(said(409, "<Code>ConditionalRequestConflict</Code>")), "unclear"),  # S3
        (exceptions.PermissionDeniedError(said(403)), "refused"),
        (exceptions.UnauthenticatedError(said(401)), "refused"),
        (exceptions.GenericError(said(403)), "refused"),
        (exceptions.GenericError(said(400)), "refused"),
        (exceptions.GenericError(said(301)), "refused"),
        (exceptions.GenericError(said(501)), "refused"),
        (exceptions.NotSupportedError("no"), "refused"),
        (exceptions.GenericError("Error performing PUT http://169.254.169.254/latest/api/token"), "refused"),
        (exceptions.GenericError(f"http://169.254.169.254/ {said(503)}"), "unclear"),
        (exceptions.GenericError(said(416)), "past the end"),
        (exceptions.GenericError("Wanted range starting at 10, but object was only 10 bytes long"), "past the end"),
        (exceptions.PermissionDeniedError(said(403, "<Code>RequestTimeTooSkewed</Code>")), "refused"),
        (exceptions.GenericError(said(408)), "unclear"),
        (exceptions.GenericError(said(429)), "unclear"),
        (exceptions.GenericError(said(500)), "unclear"),
        (exceptions.GenericError("error sending request"), "unclear"),
        (ConnectionError("the body has 3 bytes"), "unclear"),
    ],
)
def test_answers(error, kind) -> None:
    answer = understand(error)
    assert answer.kind == kind
    assert "\n" not in answer.said
    assert bool(answer.advice) == (kind not in {"absent", "past the end"})
