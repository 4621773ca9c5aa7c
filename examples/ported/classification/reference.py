"""torchvision's references/classification/train.py in small, in plain torch.

torchrun --nproc-per-node 2 examples/ported/classification/reference.py

DistributedDataParallel, label smoothing, SGD without weight decay on norms and biases, a warm-up and then a cosine by epochs,
clipping, and an average of the model with its buffers, which starts after the warm-up (`model_ema_steps` is 1).

The loss of a step is the mean over the ranks, where the original prints that of rank 0. What is returned is what rank 0
saves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from model import ResNet, loaders
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR
from torch.optim.swa_utils import AveragedModel

epochs, lr, momentum, weight_decay, label_smoothing, clip_grad_norm = 4, 0.1, 0.9, 1e-3, 0.1, 1.0
lr_warmup_epochs, lr_warmup_decay, lr_min, model_ema_decay = 1, 0.01, 1e-4, 0.8

Loader = Iterable[list[Tensor]]


def set_weight_decay(model: nn.Module) -> list[dict[str, Any]]:
    decay = [p for p in model.parameters() if p.dim() >= 2]
    no_decay = [p for p in model.parameters() if p.dim() < 2]  # of norms, and biases
    return [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]


def make_scheduler(optimizer: torch.optim.Optimizer) -> LRScheduler:
    warmup = LinearLR(optimizer, start_factor=lr_warmup_decay, total_iters=lr_warmup_epochs)
    cosine = CosineAnnealingLR(optimizer, T_max=epochs - lr_warmup_epochs, eta_min=lr_min)
    return SequentialLR(optimizer, [warmup, cosine], milestones=[lr_warmup_epochs])


class ExponentialMovingAverage(AveragedModel):
    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model, avg_fn=lambda old, new, n: decay * old + (1 - decay) * new, use_buffers=True)


def train_one_epoch(
    model: nn.Module,
    model_ema: ExponentialMovingAverage,
    criterion: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_loader: Loader,
    epoch: int,
    ranks: int,
) -> list[float]:
    losses = []
    model.train()
    for image, target in data_loader:
        loss = criterion(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
        optimizer.step()
        model_ema.update_parameters(model.module if ranks > 1 else model)
        if epoch < lr_warmup_epochs:
            model_ema.n_averaged.fill_(0)  # the next update copies the model
        loss = loss.detach() / ranks
        if ranks > 1:
            dist.all_reduce(loss)
        losses.append(loss.item())
    return losses


@torch.inference_mode()
def evaluate(model: nn.Module, data_loader: Loader, name: str, ranks: int) -> str:
    model.eval()
    counts = torch.zeros(2, dtype=torch.int64)
    for image, target in data_loader:
        counts += torch.stack([(model(image).argmax(1) == target).sum(), torch.tensor(len(target))])
    if ranks > 1:
        dist.all_reduce(counts)
    return f"{name} Acc@1 {100 * counts[0] / counts[1]:.3f}"


def main(data_loader: Loader, data_loader_test: Loader, ranks: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = model_without_ddp = ResNet().double()
    criterion = nn.CrossEntropyLoss(label_smoothing=label_smoothing)
    optimizer = torch.optim.SGD(set_weight_decay(model), lr=lr, momentum=momentum)
    lr_scheduler = make_scheduler(optimizer)
    model_ema = ExponentialMovingAverage(model_without_ddp, model_ema_decay)
    if ranks > 1:
        model = DistributedDataParallel(model)

    losses, lines = [], []
    for epoch in range(epochs):
        losses += train_one_epoch(model, model_ema, criterion, optimizer, data_loader, epoch, ranks)
        lr_scheduler.step()
        if ranks > 1:  # a rank's average has its own buffers, of which rank 0's are saved
            for value in (*model_without_ddp.buffers(), *model_ema.module.buffers()):
                dist.broadcast(value, 0)
        lines.append(evaluate(model, data_loader_test, "Test:", ranks))
        lines.append(evaluate(model_ema, data_loader_test, "Test: EMA", ranks))
        if dist.get_rank() == 0:
            print(f"Epoch: [{epoch}] loss: {losses[-1]:.4f}", *lines[-2:], sep="\n")
    return {
        "losses": losses,
        "lines": lines,
        "params": dict(model_without_ddp.named_parameters()),
        "buffers": dict(model_without_ddp.named_buffers()),
        "ema": dict(model_ema.module.named_parameters()),
        "ema_buffers": dict(model_ema.module.named_buffers()),
    }


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(*loaders(dist.get_rank(), dist.get_world_size(), uneven=False), dist.get_world_size())
    dist.destroy_process_group()
