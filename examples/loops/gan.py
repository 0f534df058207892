"""Train a GAN with two optimizers: points on a ring, and a generator that learns to make them."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import data

import lockstep

EPOCHS, Z = 15, 4  # Z: dimensions of the noise that a point is generated from


def ring(count: int) -> data.TensorDataset:
    """Return points at a distance of about 2 from the origin."""
    generator = torch.Generator().manual_seed(1)
    angle = math.tau * torch.rand(count, generator=generator)
    radius = 2 + 0.1 * torch.randn(count, generator=generator)
    return data.TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], 1))


def network(inputs: int, outputs: int, width: int = 32) -> nn.Module:
    """Return a perceptron with two hidden layers."""
    layers = [nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, outputs)]
    return nn.Sequential(*layers)


def main(world: lockstep.World) -> float:
    """Train, and return the mean distance of generated points from the origin."""
    device = world.device
    torch.manual_seed(0)
    points = ring(300)
    generator, discriminator = network(Z, 2).to(device), network(2, 1).to(device)
    g_adam = torch.optim.Adam(generator.parameters(), 3e-3, (0.5, 0.9))
    d_adam = torch.optim.Adam(discriminator.parameters(), 3e-3, (0.5, 0.9))
    run = lockstep.Run(world, "runs/gan", g=generator, d=discriminator, g_adam=g_adam, d_adam=d_adam)
    for epoch in range(EPOCHS):
        for (x,) in run.batches(points, global_batch=50, epochs=epoch + 1):
            x, n = x.to(device), len(x)
            z = run.rng.normal("z", Z)
            fake = generator(z)

            real_loss = F.softplus(-discriminator(x)).mean()
            fake_loss = F.softplus(discriminator(fake.detach())).mean()
            d_adam.zero_grad()
            run.backward((real_loss + fake_loss) * n, weight=n, name="d")
            d_adam.step()
            if epoch == 0:
                continue  # the discriminator has a start

            g_loss = F.softplus(-discriminator(fake)).mean()
            g_adam.zero_grad()
            run.backward(g_loss * n, weight=n, name="g")
            g_adam.step()
    with torch.no_grad():
        made = generator(torch.linspace(-2, 2, 100 * Z, device=device).view(Z, 100).T)
    return made.norm(dim=1).mean().item()


if __name__ == "__main__":
    with lockstep.world() as world:
        world.print(f"generated points have a mean radius of {main(world):.3f}")
