#!/usr/bin/env bash
# Train on all visible GPUs, or with two CPU processes where there are none. Flags go through to main.py, and so does
# another --task or --config.
#   NUM_GPUS, CUDA_VISIBLE_DEVICES and MASTER_PORT are taken from the environment.
set -euo pipefail
cd "$(dirname "$0")"
[ -d ../../.venv/bin ] && PATH="$PWD/../../.venv/bin:$PATH"
GPUS=$(python -c 'import torch; print(torch.cuda.device_count())')
NUM_GPUS=${NUM_GPUS:-$((GPUS > 0 ? GPUS : 2))}
# A port of your choice, or any free one.
PORT=(--standalone)
[ -n "${MASTER_PORT:-}" ] && PORT=(--master_port="$MASTER_PORT")
exec torchrun --nproc_per_node="$NUM_GPUS" "${PORT[@]}" main.py --config configs/ddp_example.yaml --task train "$@"
