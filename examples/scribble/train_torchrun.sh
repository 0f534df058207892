#!/usr/bin/env bash
# Train with torchrun on all visible GPUs, or with two CPU processes where there are none. Flags are passed on to train.py.
#   NUM_GPUS, CUDA_VISIBLE_DEVICES and MASTER_PORT are read from the environment.
set -euo pipefail
cd "$(dirname "$0")"
[ -d ../../.venv/bin ] && PATH="$PWD/../../.venv/bin:$PATH"
GPUS=$(python -c 'import torch; print(torch.cuda.device_count())')
NUM_GPUS=${NUM_GPUS:-$((GPUS > 0 ? GPUS : 2))}
# The port that MASTER_PORT gives, or any free one.
PORT=(--standalone)
[ -n "${MASTER_PORT:-}" ] && PORT=(--master_port="$MASTER_PORT")
exec torchrun --nproc_per_node="$NUM_GPUS" "${PORT[@]}" train.py --distributed \
    --layers 50 --model_type res50_ASPP_lorm --batchsize 8 --workers 4 "$@"
