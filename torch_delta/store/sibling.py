"""URLs of stores that lie beside another one, in the same folder and never outside it (rules K1 and N2)."""

from __future__ import annotations

from urllib.parse import quote

from torch_delta.errors import TorchDeltaError
from torch_delta.format.keys import validate_key

_FEWEST_SEGMENTS = {"file": 1, "memory": 1, "hf": 4}  # of a URL that lies in a folder; others: a bucket and a prefix


def sibling_url(url: str, root: str) -> str:
    """The URL of a store beside another one.

    Args:
        url: of the other one, as `Store.url` has it.
        root: keys joined by slashes, relative to the folder that the other one lies in.

    Raises:
        FormatError: `root` would lead out of that folder (rules K1 and N2).
        TorchDeltaError: the other one does not lie in a folder: it is a whole bucket.
    """
    validate_key(root)
    scheme, separator, path = url.partition("://")
    path = path.rstrip("/")
    parent, slash, _ = path.rpartition("/")
    if not separator or path.strip("/").count("/") + 1 < _FEWEST_SEGMENTS.get(scheme, 2) or path in {"", "/"}:
        raise TorchDeltaError(
            f"{url} lies in no folder, so that nothing can lie beside it; give streams a URL below a bucket, such as "
            f"{url.rstrip('/')}/run-1",
            url=url,
        )
    return f"{scheme}://{parent}{slash}{quote(root) if scheme == 'file' else root}"
