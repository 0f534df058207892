"""Classify small noisy images."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import data

N_CLASSES, SIZE = 10, 8
EPOCHS = 3


def images(count: int, seed: int) -> data.TensorDataset:
    """Return images of ten shapes, each shifted by some pixels, with noise."""
    shapes = torch.rand(N_CLASSES, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(N_CLASSES, (count,), generator=generator)
    shifts = torch.randint(SIZE, (count,), generator=generator)
    moved = [shapes[label].roll(int(shift), 1) for label, shift in zip(labels, shifts, strict=True)]
    noise = 0.2 * torch.randn(count, SIZE, SIZE, generator=generator)
    return data.TensorDataset((torch.stack(moved) + noise).unsqueeze(1), labels)


class Net(nn.Sequential):
    """Two convolutions with BatchNorm, and a linear layer."""

    def __init__(self, width: int = 12):
        super().__init__(
            nn.Conv2d(1, width, 3, padding=1, padding_mode="circular"),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, padding_mode="circular"),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(width * SIZE * SIZE, N_CLASSES),
        )


@torch.no_grad()
def count_correct(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x).argmax(1) == y).sum()


def main() -> float:
    """Train, and return the accuracy on the test set."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    train_set, test_set = images(500, seed=1), images(203, seed=2)
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
    for epoch in range(EPOCHS):
        for x, y in data.DataLoader(train_set, 40, shuffle=True):
            x, y = x.to(device), y.to(device)
            loss = F.cross_entropy(model(x), y, label_smoothing=0.1 / (epoch + 1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for x, y in data.DataLoader(test_set, 100):
        correct += count_correct(model, x.to(device), y.to(device))
    return correct.item() / len(test_set)


if __name__ == "__main__":
    print(f"accuracy {main():.4f}")
