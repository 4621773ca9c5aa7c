"""The example mnist/main.py (pytorch/examples) as a `train_step`, which several ranks can run too.

python examples/ported/mnist/train_step.py
torchrun --nproc-per-node 2 examples/ported/mnist/train_step.py

Changed: the optimizer and its scheduler are a pipeline, the loop goes over `step.join`, and the test counts the images of all ranks.

Checked at the end: losses, test lines and parameters are those of reference.py. One process has its dropout and its shuffling
too, and is equal to the bit. Ranks that hold different numbers of images are compared with one process on all of
them, in float64 up to 1e-12; dropout is off there, since ranks draw other masks than one process.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from model import Net, loaders
from torch import Tensor
from torch.optim.lr_scheduler import StepLR

import fjoin
from fjoin import transforms as tx

epochs, lr, gamma, log_interval, seed = 3, 1.0, 0.7, 5, 1


def train(
    step: fjoin.TrainStep, state: fjoin.TrainState, train_loader: Iterable[list[Tensor]], epoch: int
) -> tuple[fjoin.TrainState, list[float]]:
    losses = []
    for batch_idx, batch in enumerate(step.join(train_loader)):
        state, metrics = step(state, batch)
        losses.append(metrics.loss)
        if batch_idx % log_interval == 0 and step.rank == 0:
            print(f"Train Epoch: {epoch} [{batch_idx}]\tLoss: {metrics.loss:.6f}")
    return state, losses


def test(apply: Any, params: dict[str, Tensor], test_loader: Iterable[list[Tensor]]) -> str:
    def count(batch: list[Tensor]) -> dict[str, Any]:
        data, target = batch
        output = apply.eval()(params, {}, data)
        return {"loss": F.nll_loss(output, target), "sum": {"correct": (output.argmax(dim=1) == target).sum()}}

    found = fjoin.evaluate(count, test_loader, weight=lambda batch: len(batch[1]))
    correct = f"{found.sums['correct']:.0f}/{found.weight:.0f}"
    return f"Test set: Average loss: {found.means['loss']:.4f}, Accuracy: {correct}"


def main(
    train_loader: Iterable[list[Tensor]], test_loader: Iterable[list[Tensor]], steps_per_epoch: int, dropout: float
) -> dict[str, Any]:
    torch.manual_seed(seed)
    apply, params, _ = fjoin.functional(Net(dropout))
    rate = tx.from_torch_scheduler(lambda opt: StepLR(opt, step_size=1, gamma=gamma), lr, total_steps=epochs)
    pipeline = tx.fuse(tx.mean("data"), tx.adadelta(lambda step: rate(step // steps_per_epoch)))
    step = fjoin.train_step(
        lambda params, batch: F.nll_loss(apply(params, {}, batch[0]), batch[1]),
        pipeline,
        weight=lambda batch: len(batch[1]),
    )
    state = step.init(params)
    losses: list[float] = []
    lines = []
    for epoch in range(1, epochs + 1):
        state, more = train(step, state, train_loader, epoch)
        losses += more
        lines.append(test(apply, state.params, test_loader))
        if step.rank == 0:
            print(lines[-1])
    return {"losses": losses, "lines": lines, "params": state.params}


if __name__ == "__main__":
    import sys
    from pathlib import Path

    import reference

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from _compare import Together, finish, start

    rank, ranks = start()
    dropout = 0.25 if ranks == 1 else 0.0
    if ranks > 1:
        torch.set_default_dtype(torch.float64)
    steps_per_epoch = max(len(loaders(r, ranks)[0]) for r in range(ranks))

    def one_process() -> dict[str, Any]:
        to_train, to_test = zip(*(loaders(r, ranks) for r in range(ranks)), strict=True)
        return reference.main(Together(to_train), Together(to_test), dropout)

    finish(main(*loaders(rank, ranks), steps_per_epoch, dropout), one_process, largest=0.0 if ranks == 1 else 1e-12)
