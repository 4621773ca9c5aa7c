"""The example mnist in small, in plain torch: dropout, Adadelta, a rate that falls after each epoch, a test after each.

python examples/ported/mnist/reference.py
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from model import Net, loaders
from torch import Tensor
from torch.optim.lr_scheduler import StepLR

epochs, lr, gamma, log_interval, seed = 3, 1.0, 0.7, 5, 1


def train(
    model: Net, train_loader: Iterable[list[Tensor]], optimizer: torch.optim.Optimizer, epoch: int
) -> list[float]:
    losses = []
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if batch_idx % log_interval == 0:
            print(f"Train Epoch: {epoch} [{batch_idx}]\tLoss: {loss.item():.6f}")
    return losses


def test(model: Net, test_loader: Iterable[list[Tensor]]) -> str:
    model.eval()
    test_loss, correct, total = 0.0, 0, 0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            correct += int((output.argmax(dim=1) == target).sum())
            total += len(target)
    line = f"Test set: Average loss: {test_loss / total:.4f}, Accuracy: {correct}/{total}"
    print(line)
    return line


def main(
    train_loader: Iterable[list[Tensor]], test_loader: Iterable[list[Tensor]], dropout: float = 0.25
) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Net(dropout)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=gamma)
    losses, lines = [], []
    for epoch in range(1, epochs + 1):
        losses += train(model, train_loader, optimizer, epoch)
        lines.append(test(model, test_loader))
        scheduler.step()
    params = {path: p.detach() for path, p in model.named_parameters()}
    return {"losses": losses, "lines": lines, "params": params}


if __name__ == "__main__":
    main(*loaders())
