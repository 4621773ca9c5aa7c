"""torchvision's references/classification/train.py (pytorch/vision) as a `train_step`.

torchrun --nproc-per-node 2 examples/ported/classification/train_step.py
torchrun --nproc-per-node 2 examples/ported/classification/train_step.py --sync-bn

Changed: the optimizer with its groups, the scheduler, the clipping and the average of the model are one pipeline, which takes
the scheduler and the criterion of torch as they are; the average of the buffers is a transform of buffers. The images to
test on are counted over all ranks, without padding.

Checked at the end, in float64 up to 1e-12: losses, evaluation lines, parameters, running statistics, and the averages of both are
those of reference.py. With --sync-bn batch normalization is over all ranks, ranks hold different numbers of images,
and the reference is one process on all of them; torch's SyncBatchNorm takes neither such ranks nor CPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from model import ResNet, loaders
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

import fjoin
from fjoin import transforms as tx

epochs, lr, momentum, weight_decay, label_smoothing, clip_grad_norm = 4, 0.1, 0.9, 1e-3, 0.1, 1.0
lr_warmup_epochs, lr_warmup_decay, lr_min, model_ema_decay = 1, 0.01, 1e-4, 0.8

Loader = Iterable[list[Tensor]]


def make_scheduler(optimizer: torch.optim.Optimizer) -> LRScheduler:
    warmup = LinearLR(optimizer, start_factor=lr_warmup_decay, total_iters=lr_warmup_epochs)
    cosine = CosineAnnealingLR(optimizer, T_max=epochs - lr_warmup_epochs, eta_min=lr_min)
    return SequentialLR(optimizer, [warmup, cosine], milestones=[lr_warmup_epochs])


def make_pipeline(params: dict[str, Tensor], steps_per_epoch: int, ema: tx.Transform) -> tx.Pipeline:
    by_epoch = tx.from_torch_scheduler(make_scheduler, lr, epochs)
    rate = lambda step: by_epoch(step // steps_per_epoch)  # noqa: E731
    decay = tuple(path for path, p in params.items() if p.dim() >= 2)  # none on norms and biases
    sgd = {
        decay: tx.sgd(rate, momentum=momentum, weight_decay=weight_decay),
        "*": tx.sgd(rate, momentum=momentum),
    }
    return tx.fuse(tx.chain(tx.mean("data"), tx.clip_by_global_norm(clip_grad_norm)), tx.partition(sgd), after=ema)


def evaluate(apply: Any, params: Any, buffers: Any, data_loader: Loader, name: str) -> str:
    def count(batch: list[Tensor]) -> dict[str, Any]:
        image, target = batch
        return {"acc1": (apply.eval()(params, buffers, image).argmax(1) == target).double().mean()}

    found = fjoin.evaluate(count, data_loader, weight=lambda batch: len(batch[1]))
    return f"{name} Acc@1 {100 * found.means['acc1']:.3f}"


def main(data_loader: Loader, data_loader_test: Loader, steps_per_epoch: int, sync_bn: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = ResNet().double()
    if sync_bn:
        model = tx.convert_sync_batchnorm(model)
    apply, params, buffers = fjoin.functional(model)
    criterion = nn.CrossEntropyLoss(label_smoothing=label_smoothing)

    def loss_fn(params: Any, buffers: Any, batch: list[Tensor]) -> tuple[Tensor, None, Any]:
        image, target = batch
        output, buffers = apply.with_buffers(params, buffers, image)
        return criterion(output, target), None, buffers

    ema = tx.switch_after(lr_warmup_epochs * steps_per_epoch, tx.identity(), tx.ema(model_ema_decay))
    step = fjoin.train_step(
        loss_fn,
        make_pipeline(params, steps_per_epoch, ema),
        weight=lambda batch: len(batch[1]),
        on_buffers=tx.chain(tx.broadcast_buffers("data"), ema),
    )
    state = step.init(params, buffers)

    losses, lines = [], []
    for epoch in range(epochs):
        for batch in step.join(data_loader, when_exhausted="replay"):
            state, metrics = step(state, batch)
            losses.append(metrics.loss)
        average = tx.ema_params(state.params, state.pipeline), tx.ema_params(state.buffers, state.on_buffers)
        lines.append(evaluate(apply, state.params, state.buffers, data_loader_test, "Test:"))
        lines.append(evaluate(apply, *average, data_loader_test, "Test: EMA"))
        if step.rank == 0:
            print(f"Epoch: [{epoch}] loss: {losses[-1]:.4f}", *lines[-2:], sep="\n")
    return {
        "losses": losses,
        "lines": lines,
        "params": state.params,
        "buffers": state.buffers,
        "ema": average[0],
        "ema_buffers": average[1],
    }


if __name__ == "__main__":
    from pathlib import Path

    import reference

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from _compare import Together, finish, start

    rank, ranks = start()
    sync_bn = "--sync-bn" in sys.argv
    of_ranks = [loaders(r, ranks, uneven=sync_bn) for r in range(ranks)]
    steps_per_epoch = max(len(to_train) for to_train, _ in of_ranks)

    def as_it_was() -> dict[str, Any]:
        if not sync_bn:
            return reference.main(*loaders(rank, ranks, uneven=False), ranks)
        to_train, to_test = zip(*(loaders(r, ranks, uneven=True) for r in range(ranks)), strict=True)
        return reference.main(Together(to_train), Together(to_test), 1)

    finish(main(*of_ranks[rank], steps_per_epoch, sync_bn), as_it_was, largest=1e-12)
