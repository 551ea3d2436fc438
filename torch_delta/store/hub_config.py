"""From ``hf://buckets/owner/name/prefix`` to a location and an endpoint, and the limits of a Hub store."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from torch_delta.errors import TorchDeltaError
from torch_delta.store.object_config import is_loopback

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_SEGMENT: Final = re.compile(r"[A-Za-z0-9_=+@-][A-Za-z0-9._=+@-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class HubConfig:
    """Limits of one Hub store. The defaults suit links from about 1 MB/s."""

    endpoint: str | None = None
    """The Hub's address. None: `HF_ENDPOINT`, else what huggingface_hub was configured with."""
    allow_http: bool = False
    """Send the token and the weights unencrypted to a host that is not this machine."""
    connect_timeout_s: float = 5.0
    """Longest time to open a connection, seconds."""
    stall_timeout_s: float = 20.0
    """A transfer or reply in which no byte moves for this long is cut and repeated, seconds."""
    request_timeout_s: float = 60.0
    """Longest time for one request to the Hub with its reply, seconds. Transfers by hf-xet may take longer while bytes
    move."""
    operation_timeout_s: float = 120.0
    """No attempt of an operation starts later than this after its call, seconds."""
    claim_timeout_s: float = 30.0
    """A claim of a name that its writer neither used nor withdrew for so long counts as a dead writer's, seconds. A
    writer uses its own for half of this, and no batch may take longer than half of this. All writers of a stream must
    use the same."""
    chunk_bytes: int = 8 << 20
    """Up to this size objects and ranges are read by one plain request; what is larger comes through hf-xet. bytes."""
    exclusive_bytes: int = 64 << 20
    """Bytes objects and tuples up to this size are created exclusively (docs/stores.md); what is larger, and every
    other iterable, is refused without a nonce in its name. The default is the largest commit there can be. bytes."""

    def __post_init__(self) -> None:
        for name in (
            "connect_timeout_s", "stall_timeout_s", "request_timeout_s", "operation_timeout_s", "claim_timeout_s",
        ):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ValueError(f"expected {name} > 0, got {getattr(self, name)}")
        for name in ("chunk_bytes", "exclusive_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class HubLocation:
    """A parsed bucket URL.

    Attributes:
        bucket: ``"owner/name"``.
        prefix: folder of the store in it, without slashes at its ends; may be empty.
    """

    bucket: str
    prefix: str

    @property
    def url(self) -> str:
        """The canonical spelling."""
        return f"hf://buckets/{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")

    def path(self, key: str) -> str:
        """Where an object lies in the bucket."""
        return f"{self.prefix}/{key}" if self.prefix else key

    def key(self, path: str) -> str | None:
        """The name of what lies at `path` of the bucket, or None if it is outside this store."""
        if not self.prefix:
            return path
        return path.removeprefix(f"{self.prefix}/") if path.startswith(f"{self.prefix}/") else None


def parse_hub_url(text: str) -> HubLocation:
    """Take ``hf://buckets/owner/name/some/prefix`` apart.

    Raises:
        TorchDeltaError: it is malformed; the message leaves out what might be a secret.
    """
    rest = text.partition("://")[2]
    kind, _, path = rest.partition("/")
    owner, _, path = path.partition("/")
    name, _, prefix = path.partition("/")
    if "@" in owner or "@" in kind:
        raise TorchDeltaError(
            "hf://...: credentials do not belong into a URL; set HF_TOKEN or log in with `hf auth login`", scheme="hf"
        )
    prefix = prefix.removesuffix("/")
    if (
        kind != "buckets"
        or not _NAME.fullmatch(owner)
        or not _NAME.fullmatch(name)
        or not all(_SEGMENT.fullmatch(segment) for segment in (prefix.split("/") if prefix else []))
    ):
        raise TorchDeltaError(
            f"not a store URL: {text!r}: expected hf://buckets/owner/name/prefix (a bucket; a model or data set repo "
            "cannot hold a stream); a prefix has letters, digits and any of . _ = + @ - in segments that do not start "
            "with a dot, joined by single slashes",
            url=text,
            scheme="hf",
        )
    return HubLocation(f"{owner}/{name}", prefix)


def hub_endpoint(location: HubLocation, config: HubConfig) -> str:
    """The Hub's address in force, without a slash at its end.

    Raises:
        TorchDeltaError: it would send the token unencrypted to another machine, or is no address.
    """
    endpoint = config.endpoint if config.endpoint is not None else os.environ.get("HF_ENDPOINT") or None
    if endpoint is None:
        from huggingface_hub import constants

        endpoint = constants.ENDPOINT
    endpoint = endpoint.rstrip("/")
    parts = urlsplit(endpoint)
    if parts.username is not None or parts.scheme not in {"http", "https"} or not parts.hostname:
        raise TorchDeltaError(
            f"{location.url}: expected an endpoint https://host[:port] without credentials; check HF_ENDPOINT",
            url=location.url,
        )
    if parts.scheme == "http" and not is_loopback(parts.hostname) and not config.allow_http:
        raise TorchDeltaError(
            f"{location.url}: the endpoint {endpoint} would send token and weights unencrypted. Use https, or "
            "HubConfig(allow_http=True) if the network is trusted",
            url=location.url,
            endpoint=endpoint,
        )
    return endpoint
