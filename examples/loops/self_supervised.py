"""Learn features without labels: a student predicts what a teacher, the average of its own weights, sees."""

import copy
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import data

import lockstep

N_CLASSES, SIZE, EPOCHS = 8, 32, 4


def signals(count: int, seed: int) -> data.TensorDataset:
    """Return noisy signals of some classes, and their labels, which training does not use."""
    shapes = torch.randn(N_CLASSES, SIZE, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(N_CLASSES, (count,), generator=generator)
    return data.TensorDataset(shapes[labels] + 0.8 * torch.randn(count, SIZE, generator=generator), labels)


def network(inputs: int, outputs: int, width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, outputs))


@torch.no_grad()
def follow(teacher: nn.Module, student: nn.Module, decay: float) -> None:
    """Move the teacher's weights towards the student's."""
    for average, live in zip(teacher.parameters(), student.parameters(), strict=True):
        average.lerp_(live, 1 - decay)


@torch.no_grad()
def embed(model: nn.Module, batches: Iterable[Sequence[Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the features and the labels of all samples."""
    device = next(model.parameters()).device
    features, labels = zip(*((model(x.to(device)), y.to(device)) for x, y in batches), strict=True)
    return torch.cat(features), torch.cat(labels)


def neighbour_accuracy(features: Tensor, labels: Tensor) -> float:
    """Return how often the nearest neighbour of a sample is of its class: not a sum, it needs all samples at once."""
    features = F.normalize(features, dim=1)
    nearest = (features @ features.T).fill_diagonal_(-2).argmax(1)
    return (labels[nearest] == labels).double().mean().item()


def main(world: lockstep.World) -> float:
    """Train, and return how often the nearest neighbour of a test sample is of its class."""
    device = world.device
    torch.manual_seed(0)
    train_set, test_set = signals(400, seed=1), signals(101, seed=2)
    student = nn.Sequential(network(SIZE, 16), network(16, 16)).to(device)
    teacher = copy.deepcopy(student[0]).requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), 1e-2)
    run = lockstep.Run(world, "runs/self_supervised", student=student, teacher=teacher, optimizer=optimizer)
    for epoch in range(EPOCHS):
        for x, _ in run.batches(train_set, global_batch=50, epochs=epoch + 1):
            noise = run.rng.normal("noise", 2, SIZE)
            one, other = (x.to(device)[:, None] + 0.4 * noise).unbind(1)
            loss = -F.cosine_similarity(student(one), teacher(other)).mean()
            optimizer.zero_grad()
            run.backward(loss * len(x), weight=len(x))
            optimizer.step()
            follow(teacher, student[0], decay=1 - 0.1 / (epoch + 1))
    teacher.eval()
    return neighbour_accuracy(*map(world.gather_rows, embed(teacher, run.shard(test_set, 50))))


if __name__ == "__main__":
    with lockstep.world() as world:
        world.print(f"nearest neighbours of the same class: {main(world):.4f}")
