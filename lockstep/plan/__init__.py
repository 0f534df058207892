"""What a run needs, before anything is rented: work and memory from fake tensors, time from a model of the hardware.

    measure.py    FLOPs, memory traffic and memory of one step, without a GPU and without a computation
    hardware.py   the GPUs that a plan knows: peaks, bandwidths, links
    memory.py     what one GPU has to hold, and the largest micro-batch that fits
    predict.py    seconds of a step on N GPUs
    scaling.py    global batch, learning rate, speed-up and days for each number of GPUs
    real.py       a few real steps: what a prediction is corrected by, where there is a GPU
    picture.py    the plan as a plot

docs/plan.md states the model, and its errors where it was checked.
"""
