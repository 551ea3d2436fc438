"""On CPU: linear and expert weights stay as they were loaded, and are computed with as they are.

vLLM repacks weights for its CPU kernels after loading, and computes from the packed copy: a write into the parameter
would be torn (experts are repacked in place) or have no effect (an `lm_head` keeps both). Its own reload has the same
trouble with experts. So where our backend is selected, and only there, both are computed from the plain weights by
torch. GPUs are not touched: what is shuffled there is found by the probe and its proof, and goes by the reload path.

This replaces three functions of vLLM, once per process, before a model is built. Nothing changes for other engines of
the process: every replacement asks, layer by layer, whether the configuration under which it is built selects us.
"""

from __future__ import annotations

import functools
import inspect
import logging
from typing import TYPE_CHECKING, Any

from torch_delta.errors import TorchDeltaError
from torch_delta.vllm import versions

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_logger = logging.getLogger("torch_delta")
_replaced: list[tuple[Any, str, Any]] = []
_problem: str | None = None
_told = False


def backend_selected() -> bool:
    """Whether the vLLM configuration in force selects our backend; False where none is in force."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return config is not None and versions.selected(config)


def keep_unpacked(when: Callable[[], bool] = backend_selected) -> bool:
    """Install the replacements; idempotent.

    Args:
        when: asked for every layer that is about to be packed.

    Returns:
        Whether they are installed: False where the platform is not a CPU, or where vLLM has not what they replace;
        then `problem` says what.
    """
    global _problem  # noqa: PLW0603 - one process, one vLLM
    if _replaced:
        return True
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    try:
        from vllm.model_executor.layers import utils
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

        dispatch = utils.dispatch_cpu_unquantized_gemm
        process = CPUUnquantizedExperts.process_weights_after_loading
        apply = CPUUnquantizedExperts.apply
    except (ImportError, AttributeError) as error:
        _problem = f"this vLLM packs CPU weights in a way that torch_delta does not know ({error})"
        return False
    _replace(utils, "dispatch_cpu_unquantized_gemm", _plain_linear(dispatch, when))
    _replace(CPUUnquantizedExperts, "process_weights_after_loading", _plain_experts(process, when))
    _replace(CPUUnquantizedExperts, "apply", _apply_plain_experts(apply))
    return True


def problem() -> str | None:
    """Why weights cannot be kept unpacked on this CPU, a sentence without its end; None if they can."""
    return _problem


def restore_packing() -> None:
    """Take the replacements back; models that were built meanwhile stay as they are."""
    global _problem, _told
    while _replaced:
        holder, name, original = _replaced.pop()
        setattr(holder, name, original)
    _problem, _told = None, False


def _replace(holder: Any, name: str, replacement: Any) -> None:
    _replaced.append((holder, name, getattr(holder, name)))
    setattr(holder, name, replacement)


def _tell() -> None:
    global _told  # noqa: PLW0603 - once per process
    if not _told:
        _told = True
        _logger.info(
            "CPU linear and expert weights stay unpacked and are computed with by torch, because the weight transfer "
            "backend is torch_delta: updates in place need it. Generation is slower than with packed weights"
        )


def _plain_linear(original: Callable[..., Any], when: Callable[[], bool]) -> Callable[..., Any]:
    @functools.wraps(original)
    def dispatch(layer: Any, *args: Any, **kwargs: Any) -> Any:
        # Convolutions keep vLLM's layout: its kernels know no other. The probe sees the copy and leaves them alone.
        if layer.weight.ndim != 2 or not when():
            return original(layer, *args, **kwargs)
        import torch

        _tell()
        layer.cpu_linear = torch.nn.functional.linear
        return None

    return dispatch


def _plain_experts(original: Callable[..., Any], when: Callable[[], bool]) -> Callable[..., Any]:
    @functools.wraps(original)
    def process_weights_after_loading(experts: Any, layer: Any) -> Any:
        if not when():
            return original(experts, layer)
        kind = experts.moe_config.activation.value
        if kind not in _ACTIVATIONS:
            raise TorchDeltaError(
                f"experts with the activation {kind!r} cannot be kept unpacked on CPU (supported: "
                f"{', '.join(_ACTIVATIONS)}), and vLLM cannot reload packed ones. Serve this model on a GPU",
                activation=kind,
            )
        _tell()
        experts._torch_delta_plain = True
        return None

    return process_weights_after_loading


def _apply_plain_experts(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def apply(*args: Any, **kwargs: Any) -> Any:
        if not getattr(args[0], "_torch_delta_plain", False):
            return original(*args, **kwargs)
        named = signature.bind(*args, **kwargs).arguments
        _experts(
            named["output"],
            named["hidden_states"],
            (named["w1"], args[0].w1_bias),
            (named["w2"], args[0].w2_bias),
            # With top-1 routing the weight may be in the input already.
            None if named["apply_router_weight_on_input"] else named["topk_weights"],
            _local(named["topk_ids"], named["expert_map"]),
            named["activation"].value,
        )
        return None

    return apply


def _local(expert_ids: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    """Expert numbers on this rank; -1 for experts of other ranks."""
    return expert_ids.long() if expert_map is None else expert_map[expert_ids.long()].long()


def _experts(  # noqa: PLR0917 - one caller
    output: torch.Tensor,
    hidden: torch.Tensor,
    up: tuple[torch.Tensor, torch.Tensor | None],
    down: tuple[torch.Tensor, torch.Tensor | None],
    weights: torch.Tensor | None,
    expert_ids: torch.Tensor,
    activation: str,
) -> None:
    """Every expert's gated MLP on its tokens, summed by routing weight.

    Args:
        output: [tokens, hidden], overwritten.
        hidden: [tokens, hidden].
        up: gate and up projections [experts, 2 * inner, hidden] and their bias.
        down: [experts, hidden, inner] and its bias.
        weights: [tokens, top_k], or None for ones.
        expert_ids: [tokens, top_k]; negative for none.
        activation: a key of `_ACTIVATIONS`.
    """
    import torch

    total = torch.zeros(output.shape, dtype=torch.float32, device=output.device)
    for expert in torch.unique(expert_ids).tolist():
        if expert < 0:
            continue
        token, choice = torch.where(expert_ids == expert)
        gate_up = torch.nn.functional.linear(hidden[token], up[0][expert], None if up[1] is None else up[1][expert])
        gate, value = gate_up.chunk(2, dim=-1)
        inner = _ACTIVATIONS[activation](gate) * value
        found = torch.nn.functional.linear(inner, down[0][expert], None if down[1] is None else down[1][expert]).float()
        if weights is not None:
            found = found * weights[token, choice].unsqueeze(-1).float()
        total.index_add_(0, token, found)
    output.copy_(total)


def _silu(gate: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.nn.functional.silu(gate)


def _gelu(gate: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.nn.functional.gelu(gate)


def _gelu_tanh(gate: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.nn.functional.gelu(gate, approximate="tanh")


_ACTIVATIONS = {"silu": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh}
