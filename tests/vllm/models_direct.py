"""vLLM models without an engine: built by `get_model`, on one rank or on several. Cheaper than an `LLM` by far."""

from __future__ import annotations

import warnings

from tests.vllm.engines import prepare_environment


class Models:
    """Loads models of vLLM in this process; the process joins `world_size` ranks over gloo at the first load."""

    def __init__(self, *, rank=0, world_size=1):
        prepare_environment()
        self.rank, self.world_size = rank, world_size
        self.options = {}
        self._joined = False

    def load(self, folder):
        """(vLLM config, model) of a checkpoint, as a worker would have them after loading.

        `self.options` are engine arguments; `delta` among them: whether our backend is selected, by default it is.
        """
        options = dict(self.options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import vllm.v1.worker.cpu.shm  # noqa: F401 - registers the collectives of CPU ranks
            from vllm.config import set_current_vllm_config
            from vllm.engine.arg_utils import EngineArgs
            from vllm.model_executor.model_loader import get_model
            from vllm.platforms import current_platform

            if not self._joined and hasattr(type(current_platform), "register_triton_kernel_overrides"):  # from 0.31 on
                current_platform.register_triton_kernel_overrides()
            if options.pop("delta", True):
                options["weight_transfer_config"] = {"backend": "torch_delta"}
            arguments = EngineArgs(
                model=str(folder),
                enforce_eager=True,
                max_model_len=256,
                tensor_parallel_size=self.world_size,
                skip_tokenizer_init=True,
                **options,
            )
            config = arguments.create_engine_config()
            with set_current_vllm_config(config):
                self._join(config)
                return config, get_model(vllm_config=config)

    def _join(self, config):
        if self._joined:
            return
        from vllm.distributed import init_distributed_environment, initialize_model_parallel

        self._joined = True
        # torch.distributed is up (tests/_dist.py), so the address is not used.
        init_distributed_environment(self.world_size, self.rank, "tcp://127.0.0.1:1", self.rank, "gloo")
        model_config, config.model_config = config.model_config, None  # groups for every kind of model, experts too
        try:
            initialize_model_parallel(self.world_size)
        finally:
            config.model_config = model_config


def context_of(config):
    from vllm.config import set_current_vllm_config

    return lambda: set_current_vllm_config(config)
