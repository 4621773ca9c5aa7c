"""nanoGPT's train.py (karpathy/nanoGPT) with DistributedDataParallel kept, and the optimizer inside it as a pipeline.

torchrun --nproc-per-node 2 examples/ported/nanogpt/register.py

Changed: a registered pipeline takes the place of the optimizer with its groups, of the clipping and of the rate that is set in each
iteration. The loop with its micro-steps stays; `optimizer.step()` goes, since the last backward pass of an iteration steps.

Checked at the end: losses, evaluation lines and parameters are those of reference.py, up to 1e-6 in float32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from model import GPT, GPTConfig, tokens
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx

eval_interval, eval_iters, log_interval = 5, 4, 5
gradient_accumulation_steps, batch_size = 4, 4  # the micro-steps of all ranks together
learning_rate, weight_decay, beta1, beta2, grad_clip = 1e-2, 1e-1, 0.9, 0.95, 1.0
max_iters, warmup_iters, lr_decay_iters, min_lr = 20, 4, 18, 1e-3

config = GPTConfig()
data = {split: tokens(split) for split in ("train", "val")}


def get_batch(split: str) -> tuple[Tensor, Tensor]:
    ix = torch.randint(len(data[split]) - config.block_size, (batch_size,))
    x = torch.stack([data[split][i : i + config.block_size] for i in ix])
    y = torch.stack([data[split][i + 1 : i + 1 + config.block_size] for i in ix])
    return x, y


def get_lr(it: int) -> float:
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss(model: torch.nn.Module) -> dict[str, float]:
    out = {}
    model.eval()
    for split in ("train", "val"):
        out[split] = sum(model(*get_batch(split))[1].item() for _ in range(eval_iters)) / eval_iters
    model.train()
    return out


def main() -> dict[str, Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    micro_steps = gradient_accumulation_steps // ranks
    torch.manual_seed(1337 + rank)
    model = DistributedDataParallel(GPT(config))
    decay = tuple(path for path, p in model.module.named_parameters() if p.dim() >= 2)
    adamw = {wd: tx.adamw(get_lr, (beta1, beta2), weight_decay=wd) for wd in (weight_decay, 0.0)}
    pipeline = tx.fuse(
        tx.chain(tx.mean("data", over="world"), tx.clip_by_global_norm(grad_clip)),
        tx.partition({decay: adamw[weight_decay], "*": adamw[0.0]}),
    )
    fjoin.ddp.register(model, pipeline)

    losses, lines = [], []
    for iter_num in range(max_iters + 1):
        if iter_num % eval_interval == 0 and rank == 0:
            out = estimate_loss(model)
            lines.append(f"step {iter_num}: train loss {out['train']:.4f}, val loss {out['val']:.4f}")
            print(lines[-1])
        total = torch.zeros((), dtype=torch.float64)
        for micro_step in range(micro_steps):
            model.require_backward_grad_sync = micro_step == micro_steps - 1
            _, loss = model(*get_batch("train"))
            total += loss.detach() / (micro_steps * ranks)
            (loss / micro_steps).backward()  # the last one sends the gradients and takes the step
        model.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        losses.append(total.item())
        if iter_num % log_interval == 0 and rank == 0:
            print(f"iter {iter_num}: loss {losses[-1]:.4f}")
    params = {path: p.detach() for path, p in model.module.named_parameters()}
    return {"losses": losses, "lines": lines, "params": params}


if __name__ == "__main__":
    import sys
    from pathlib import Path

    import reference

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from _compare import finish, start

    start()
    finish(main(), reference.main, largest=1e-6)
