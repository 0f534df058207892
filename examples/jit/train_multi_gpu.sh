#!/usr/bin/env bash
# Train on N GPUs, or in N CPU processes where there are no GPUs. Further flags are passed on to train.py.
#   ./train_multi_gpu.sh 4                         four GPUs (two if no number is given)
#   BATCH_SIZE=32 ./train_multi_gpu.sh 2 --lr 1e-4
set -euo pipefail
cd "$(dirname "$0")"
source settings.sh
NUM_GPUS=2
if [[ ${1:-} =~ ^[0-9]+$ ]]; then
    NUM_GPUS=$1
    shift
fi
if ((NUM_GPUS < 1 || (GPUS > 0 && NUM_GPUS > GPUS))); then
    echo "train_multi_gpu.sh: there are $GPUS GPUs here, not $NUM_GPUS; give a number from 1 to that" >&2
    exit 2
fi
show_batch "$NUM_GPUS"
# The port that MASTER_PORT gives, or any free one.
PORT=(--standalone)
[ -n "${MASTER_PORT:-}" ] && PORT=(--master_port="$MASTER_PORT")
exec torchrun --nproc_per_node="$NUM_GPUS" "${PORT[@]}" train.py "${FLAGS[@]}" "$@"
