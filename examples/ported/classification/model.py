"""A small ResNet and its images. The reference and the port use it as it is."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset


class BasicBlock(nn.Module):
    def __init__(self, inplanes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.downsample(x))


class ResNet(nn.Module):
    def __init__(self, num_classes: int = 5) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.layers = nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 16, stride=2))
        self.fc = nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(F.relu(self.bn1(self.conv1(x))))
        return self.fc(x.mean((2, 3)))


def images(n: int, seed: int) -> TensorDataset:
    """Five patterns of 3 x 8 x 8 pixels, in noise."""
    patterns = torch.randn(5, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 5, (n,), generator=g)
    return TensorDataset(patterns[labels] + torch.randn(n, 3, 8, 8, dtype=torch.float64, generator=g), labels)


def loaders(rank: int, ranks: int, uneven: bool) -> tuple[DataLoader[list[Tensor]], DataLoader[list[Tensor]]]:
    """To train and to test on. Uneven ones give rank r r + 1 times as many images to train on as rank 0."""
    train, test = images(96, seed=1), images(60, seed=2)
    parts = [range(r * (r + 1) // 2, (r + 1) * (r + 2) // 2) if uneven else range(r, r + 1) for r in range(ranks)]
    own = [i for i in range(len(train)) if i % parts[-1].stop in parts[rank]]
    shuffled = torch.Generator().manual_seed(rank)
    return (
        DataLoader(Subset(train, own), 9, shuffle=True, generator=shuffled),
        DataLoader(Subset(test, range(rank, len(test), ranks)), 10),
    )
