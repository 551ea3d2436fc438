#!/usr/bin/env bash
# Train on GSM8K with SkyRL and torch_delta; see README.md. Further SkyRL options may follow on the command line.
set -euo pipefail
: "${SYNC_DIR:?a directory every host sees, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX}"
MODEL=${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}
DATA_DIR=${DATA_DIR:-$HOME/data/gsm8k}
NUM_TRAIN_GPUS=${NUM_TRAIN_GPUS:-4}
NUM_ENGINES=${NUM_ENGINES:-4}

# The two lines that put torch_delta in the seat of SkyRL's delta backend.
export TORCH_DELTA_SKYRL=1
export RAY_RUNTIME_ENV_HOOK=torch_delta_skyrl.registering.ray_hook

servers=()
if [ -n "${EXTERNAL_PROXY_URL:-}" ]; then
    servers=(
        generator.inference_engine.run_engines_locally=false
        generator.inference_engine.external_proxy_url="$EXTERNAL_PROXY_URL"
        generator.inference_engine.external_server_urls="${EXTERNAL_SERVER_URLS:?the servers behind the proxy}"
    )
fi

exec python -m skyrl.train.entrypoints.main_base \
    data.train_data="['$DATA_DIR/train.parquet']" \
    data.val_data="['$DATA_DIR/validation.parquet']" \
    trainer.policy.model.path="$MODEL" \
    trainer.strategy=fsdp \
    trainer.placement.colocate_all=false \
    trainer.placement.policy_num_gpus_per_node="$NUM_TRAIN_GPUS" \
    generator.inference_engine.num_engines="$NUM_ENGINES" \
    generator.inference_engine.backend=vllm \
    generator.inference_engine.weight_sync_backend=delta \
    generator.inference_engine.delta_weight_sync.sync_dir="$SYNC_DIR" \
    environment.env_class=gsm8k \
    "${servers[@]}" \
    "$@"
