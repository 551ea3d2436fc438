#!/usr/bin/env bash
# Inference servers alone, for a trainer on another cluster; see README.md. The log says proxy_url and server_urls.
set -euo pipefail
: "${SYNC_DIR:?s3://BUCKET/PREFIX or gs://BUCKET/PREFIX, as of the trainer}"
MODEL=${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}
NUM_ENGINES=${NUM_ENGINES:-4}

# The two lines that put torch_delta in the seat of SkyRL's delta backend.
export TORCH_DELTA_SKYRL=1
export RAY_RUNTIME_ENV_HOOK=torch_delta_skyrl.registering.ray_hook

exec python -m skyrl.train.entrypoints.serve \
    trainer.policy.model.path="$MODEL" \
    trainer.placement.colocate_all=false \
    generator.inference_engine.num_engines="$NUM_ENGINES" \
    generator.inference_engine.backend=vllm \
    generator.inference_engine.weight_sync_backend=delta \
    generator.inference_engine.delta_weight_sync.sync_dir="$SYNC_DIR" \
    "$@"
