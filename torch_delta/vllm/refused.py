"""Stands in for the engine on a vLLM that this release does not support."""

from __future__ import annotations

from typing import NoReturn

from torch_delta.vllm import versions


class RefusedEngine:
    """Refuses to be built, which ends the start of the server."""

    def __new__(cls, *args: object) -> NoReturn:  # noqa: ARG004 - vLLM's arguments
        """See the class.

        Raises:
            TorchDeltaError: names the version and the supported ones.
        """
        versions.check_supported()
        raise AssertionError("registered on unsupported versions only")
