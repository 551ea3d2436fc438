"""TRL's AsyncGRPOTrainer against a vLLM server, kept current through a stream of deltas.

    python examples/trl_async_grpo.py                                                # a CPU, nothing else
    python examples/trl_async_grpo.py --model Qwen/Qwen3-0.6B --stream hf://buckets/me/run --server http://gpu-2:8000

The second line is a real run: the trainer here, the server elsewhere, and a bucket that both reach. What the server
must be started with is in integrations/trl/README.md.
"""

from __future__ import annotations

from trl.experimental.async_grpo import AsyncGRPOConfig

from grpo.arguments import run, show
from grpo.cpu import let_async_grpo_run
from grpo.reward import prompts
from torch_delta_trl import AsyncGRPOTrainer, DeltaSync


def main() -> None:
    with run(__doc__) as this:
        let_async_grpo_run()
        config = AsyncGRPOConfig(
            output_dir=str(this.out / "trainer"),
            vllm_server_base_url=this.server,
            max_steps=this.steps,
            per_device_train_batch_size=16,
            num_generations=16 if this.is_tiny else 8,
            max_completion_length=12 if this.is_tiny else 256,
            token_budget=384 if this.is_tiny else None,
            max_staleness=2 if this.is_tiny else 4,
            learning_rate=3e-3 if this.is_tiny else 1e-6,
            lr_scheduler_type="constant",
            use_cpu=this.is_tiny,
            bf16=not this.is_tiny,
            gradient_checkpointing=not this.is_tiny,
            report_to="none",
            save_strategy="no",
        )
        trainer = AsyncGRPOTrainer(
            this.model,
            args=config,
            train_dataset=prompts(4096),
            reward_funcs=this.reward,
            delta_sync=DeltaSync(this.stream, base=this.model),  # the one line
        )
        trainer.train()
        show(trainer.state.log_history)


if __name__ == "__main__":  # the rollout worker is a process of its own, which imports this file
    main()
