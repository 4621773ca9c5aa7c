"""nanoGPT's train.py (karpathy/nanoGPT) as a `train_step`.

torchrun --nproc-per-node 2 examples/ported/nanogpt/train_step.py

Changed: DistributedDataParallel, `require_backward_grad_sync`, the optimizer with its groups, the clipping and the rate that is set in
each iteration are one pipeline. The model, `get_batch`, `get_lr` and the evaluation stay.

Checked at the end: losses, evaluation lines and parameters are those of reference.py, up to 1e-6 in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from model import GPT, GPTConfig, tokens
from torch import Tensor

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
def estimate_loss(model: Callable[..., tuple[Tensor, Tensor]], params: dict[str, Tensor]) -> dict[str, float]:
    out = {}
    for split in ("train", "val"):
        out[split] = sum(model(params, {}, *get_batch(split))[1].item() for _ in range(eval_iters)) / eval_iters
    return out


def main() -> dict[str, Any]:
    mesh = fjoin.mesh({"data": -1})
    micro_steps = gradient_accumulation_steps // mesh.size
    torch.manual_seed(1337 + mesh.rank)
    apply, params, _ = fjoin.functional(GPT(config))
    decay = tuple(path for path, p in params.items() if p.dim() >= 2)
    adamw = {wd: tx.adamw(get_lr, (beta1, beta2), weight_decay=wd) for wd in (weight_decay, 0.0)}
    pipeline = tx.fuse(
        tx.chain(tx.mean("data"), tx.clip_by_global_norm(grad_clip)),
        tx.partition({decay: adamw[weight_decay], "*": adamw[0.0]}),
    )
    step = fjoin.train_step(
        lambda params, batch: apply(params, {}, *batch)[1], pipeline, mesh=mesh, accumulate=micro_steps
    )
    state = step.init(params)

    losses, lines = [], []
    for iter_num in range(max_iters + 1):
        if iter_num % eval_interval == 0 and step.rank == 0:
            out = estimate_loss(apply.eval(), state.params)
            lines.append(f"step {iter_num}: train loss {out['train']:.4f}, val loss {out['val']:.4f}")
            print(lines[-1])
        for _ in range(micro_steps):
            state, metrics = step(state, get_batch("train"))
        losses.append(float(metrics.loss))
        if iter_num % log_interval == 0 and step.rank == 0:
            print(f"iter {iter_num}: loss {losses[-1]:.4f}")
    return {"losses": losses, "lines": lines, "params": state.params}


if __name__ == "__main__":
    import sys
    from pathlib import Path

    import reference

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from _compare import finish, start

    start()
    finish(main(), reference.main, largest=1e-6)
