# Settings of train.sh and train_multi_gpu.sh; the environment overrides them.
[ -d ../../.venv/bin ] && PATH="$PWD/../../.venv/bin:$PATH"
DATA_PATH=${DATA_PATH:-./data/train}
BATCH_SIZE=${BATCH_SIZE:-64} # per GPU
GRADIENT_ACCUMULATION_STEPS=${GRADIENT_ACCUMULATION_STEPS:-1}
EPOCHS=${EPOCHS:-100}
LR=${LR:-5e-5} # fixed, unless --lr_scaling linear is among the flags
USE_AMP=${USE_AMP:-true}
USE_WANDB=${USE_WANDB:-false}
GPUS=$(python -c 'import torch; print(torch.cuda.device_count())')

FLAGS=(--data_path "$DATA_PATH" --batch_size "$BATCH_SIZE" --epochs "$EPOCHS" --lr "$LR"
    --gradient_accumulation_steps "$GRADIENT_ACCUMULATION_STEPS")
[ "$USE_AMP" = true ] || FLAGS+=(--no_use_amp)
[ "$USE_WANDB" = true ] && FLAGS+=(--use_wandb)

# show_batch N: print the effective batch of N processes. The receipt also includes further flags.
show_batch() {
    [ "$GPUS" -gt 0 ] && echo "$1 GPU(s)" || echo "no GPUs here: $1 CPU process(es)"
    echo "effective batch = $BATCH_SIZE × $1 × $GRADIENT_ACCUMULATION_STEPS =" \
        "$((BATCH_SIZE * $1 * GRADIENT_ACCUMULATION_STEPS))"
}
