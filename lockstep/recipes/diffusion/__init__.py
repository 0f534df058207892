"""What the recipes `dit` and `jit` share: layers, sampling, image grids, the Fréchet distance."""
