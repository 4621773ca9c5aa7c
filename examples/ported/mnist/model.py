"""The network of the example mnist, smaller, and its images. The reference and the port use it as it is."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self, dropout: float = 0.25) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.conv2 = nn.Conv2d(8, 16, 3)
        self.dropout1 = nn.Dropout(dropout)
        self.dropout2 = nn.Dropout(2 * dropout)
        self.fc1 = nn.Linear(400, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


def images(n: int, seed: int) -> TensorDataset:
    """Ten patterns of 14 x 14 pixels, in noise."""
    patterns = torch.randn(10, 1, 14, 14, generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (n,), generator=g)
    return TensorDataset(0.5 * patterns[labels] + torch.randn(n, 1, 14, 14, generator=g), labels)


def loaders(rank: int = 0, ranks: int = 1) -> tuple[DataLoader[list[Tensor]], DataLoader[list[Tensor]]]:
    """To train and to test on. Of several ranks, rank r has r + 1 times as many images as rank 0."""
    parts = [range(r * (r + 1) // 2, (r + 1) * (r + 2) // 2) for r in range(ranks)]
    total = parts[-1].stop
    made = []
    for data, batch_size in ((images(320, seed=1), 32), (images(300, seed=2), 100)):
        own = [i for i in range(len(data)) if i % total in parts[rank]]
        # Alone it draws from the generator of the dropout, as the original does.
        generator = None if ranks == 1 else torch.Generator().manual_seed(rank)
        subset = torch.utils.data.Subset(data, own)
        made.append(DataLoader(subset, batch_size, shuffle=batch_size == 32, generator=generator))
    return made[0], made[1]
