"""A language model trained with gradient checkpointing, in plain torch, as with GPT-2 of transformers.

torchrun --nproc-per-node 2 examples/ported/gpt2/reference.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from model import GPT2LMHeadModel, batches
from torch.nn.parallel import DistributedDataParallel

learning_rate, weight_decay, steps = 1e-3, 0.01, 4


def main() -> dict[str, Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = GPT2LMHeadModel()
    model.gradient_checkpointing_enable()
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=weight_decay, fused=True)

    torch.manual_seed(rank)  # each rank has its own dropout
    losses = []
    for step, batch in enumerate(batches(rank, steps)):
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / ranks)
        if rank == 0:
            print(f"step {step}: loss {losses[-1]:.4f}")
    return {"losses": losses, "params": dict(model.module.named_parameters())}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
