#!/usr/bin/env bash
# The same with torch.distributed.launch, the predecessor of torchrun.
#   NUM_GPUS, CUDA_VISIBLE_DEVICES and MASTER_PORT are read from the environment.
set -euo pipefail
cd "$(dirname "$0")"
[ -d ../../.venv/bin ] && PATH="$PWD/../../.venv/bin:$PATH"
GPUS=$(python -c 'import torch; print(torch.cuda.device_count())')
NUM_GPUS=${NUM_GPUS:-$((GPUS > 0 ? GPUS : 2))}
exec python -m torch.distributed.launch --nproc_per_node="$NUM_GPUS" --master_port="${MASTER_PORT:-29500}" --use_env \
    train.py --distributed --layers 50 --model_type res50_ASPP_lorm --batchsize 8 --workers 4 "$@"
