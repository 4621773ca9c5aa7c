"""nanoGPT's train.py in small, in plain torch: DistributedDataParallel, AdamW in two groups, gradient accumulation, cosine.

torchrun --nproc-per-node 2 examples/ported/nanogpt/reference.py

The loss of a step is the mean over its micro-batches and the ranks, where the original prints that of one micro-batch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from model import GPT, GPTConfig, tokens
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

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
    decay = [p for p in model.parameters() if p.dim() >= 2]
    no_decay = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2))

    losses, lines = [], []
    for iter_num in range(max_iters + 1):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(iter_num)
        if iter_num % eval_interval == 0 and rank == 0:
            out = estimate_loss(model)
            lines.append(f"step {iter_num}: train loss {out['train']:.4f}, val loss {out['val']:.4f}")
            print(lines[-1])
        total = torch.zeros((), dtype=torch.float64)
        for micro_step in range(micro_steps):
            model.require_backward_grad_sync = micro_step == micro_steps - 1
            _, loss = model(*get_batch("train"))
            total += loss.detach() / (micro_steps * ranks)
            (loss / micro_steps).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        losses.append(total.item())
        if iter_num % log_interval == 0 and rank == 0:
            print(f"iter {iter_num}: loss {losses[-1]:.4f}")
    params = {path: p.detach() for path, p in model.module.named_parameters()}
    return {"losses": losses, "lines": lines, "params": params}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
