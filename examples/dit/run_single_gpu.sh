#!/usr/bin/env bash
# Train on one GPU (CUDA_VISIBLE_DEVICES chooses which), or in one CPU process. Flags are passed on to train.py.
set -euo pipefail
cd "$(dirname "$0")"
[ -d ../../.venv/bin ] && PATH="$PWD/../../.venv/bin:$PATH"
PORT=(--standalone)
[ -n "${MASTER_PORT:-}" ] && PORT=(--master_port="$MASTER_PORT")
exec torchrun --nproc_per_node=1 "${PORT[@]}" train.py "$@"
