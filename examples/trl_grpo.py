"""TRL's GRPOTrainer against a vLLM server, or with vLLM in its own process, kept current through a stream of deltas.

    python examples/trl_grpo.py                                                      # a CPU, nothing else
    python examples/trl_grpo.py --model Qwen/Qwen3-0.6B --stream hf://buckets/me/run --server http://gpu-2:8000

What the server must be started with is in integrations/trl/README.md.
"""

from __future__ import annotations

from trl import GRPOConfig

from grpo.arguments import run, show
from grpo.reward import prompts
from torch_delta_trl import DeltaSync, GRPOTrainer


def main() -> None:
    with run(__doc__) as this:
        config = GRPOConfig(
            output_dir=str(this.out / "trainer"),
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=this.server,
            max_steps=this.steps,
            per_device_train_batch_size=32,
            num_generations=16 if this.is_tiny else 8,
            max_completion_length=12 if this.is_tiny else 256,
            learning_rate=3e-3 if this.is_tiny else 1e-6,
            lr_scheduler_type="constant",
            use_cpu=this.is_tiny,
            bf16=not this.is_tiny,
            gradient_checkpointing=not this.is_tiny,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
        )
        trainer = GRPOTrainer(
            this.model,
            args=config,
            train_dataset=prompts(4096),
            reward_funcs=this.reward,
            delta_sync=DeltaSync(this.stream, base=this.model),  # the one line
        )
        trainer.train()
        show(trainer.state.log_history)


if __name__ == "__main__":
    main()
