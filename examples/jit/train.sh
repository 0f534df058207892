#!/usr/bin/env bash
# Train on one GPU (CUDA_VISIBLE_DEVICES chooses which), or in one CPU process. Flags are passed on to train.py.
#   ./train.sh --model JiT-B/4 --img_size 64
set -euo pipefail
cd "$(dirname "$0")"
source settings.sh
show_batch 1
exec python train.py "${FLAGS[@]}" "$@"
