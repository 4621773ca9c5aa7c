"""CPU time, wall time and memory of a step of a sharded model: fjoin.fsdp.register beside fully_shard with torch.optim.

    python benchmarks/fsdp.py [--rounds 12] [--out benchmarks/RESULTS_FSDP.md]

2 ranks of one host over gloo train a GPT of 12 blocks of 384 by AdamW, torch's fused. In the first part both variants,
and a second torch as the control, take turns in the same processes; a ratio is taken within a round, of the CPU time of
both ranks, and of the time of the slower one. In the second part each variant has processes of its own: resident memory
above that before the model, between steps and at its peak, in units of the parameters.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fjoin
from fjoin import transforms as tx

BLOCKS, WIDTH, VOCABULARY, LENGTH, RATE = 12, 384, 512, 128, 1e-3
VARIANTS = ("torch", "torch again", "fjoin")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.qkv(self.norm1(x)).unflatten(-1, (3, 6, -1)).unbind(2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * 1.0


def make_step(variant: str) -> tuple[int, Callable[[Tensor], None]]:
    """The bytes of the parameters, and a step on a batch of tokens."""
    torch.manual_seed(0)
    model, mesh = GPT(), init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    numel = sum(p.numel() for p in model.parameters())

    def loss_of(batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    if variant == "fjoin":
        handle = fjoin.fsdp.register(model, tx.fuse(tx.mean("data"), tx.adamw(RATE)))

        def step(batch: Tensor) -> None:
            handle.backward(loss_of(batch), batch.numel())
            handle.step()
    else:
        optimizer = torch.optim.AdamW(model.parameters(), RATE, fused=True)

        def step(batch: Tensor) -> None:
            loss_of(batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    return 4 * numel, step


def batches(rank: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(rank))


def status(key: str) -> int:
    """Bytes of this process's resident memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def times(rank: int, rounds: int) -> list[Any]:
    """For each round and variant (CPU seconds, seconds) of this rank."""
    steps, batch, found = {one: make_step(one)[1] for one in VARIANTS}, batches(rank), []
    order = random.Random(0)
    for i in range(rounds + 3):
        seen = {}
        for one in order.sample(VARIANTS, len(VARIANTS)):
            dist.barrier()
            gc.collect()
            cpu, start = time.process_time(), time.perf_counter()
            steps[one](batch)
            seen[one] = time.process_time() - cpu, time.perf_counter() - start
        found += [seen] if i >= 3 else []
    return found


def memory(rank: int, variant: str) -> list[float]:
    """(between steps, at the peak of a step), in units of the parameters."""
    trim = ctypes.CDLL("libc.so.6").malloc_trim
    warm = nn.Linear(8, 8)
    warm(torch.randn(2, 8)).sum().backward()
    torch.optim.AdamW(warm.parameters(), fused=True).step()
    dist.all_reduce(torch.ones(4))
    gc.collect(), trim(0)
    base = status("VmRSS")
    size, step = make_step(variant)
    for _ in range(4):
        step(batches(rank))
    gc.collect(), trim(0)
    between = status("VmRSS") - base
    Path("/proc/self/clear_refs").write_text("5")
    step(batches(rank))
    return [between / size, (status("VmHWM") - base) / size]


def _rank(rank: int, folder: str, function: Any, args: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.save(function(rank, *args), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(function: Any, *args: Any) -> list[Any]:
    """What a function returns on each rank."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (folder, function, args), nprocs=2, start_method="spawn")
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(2)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # freed tensors are given back
    cpu: dict[str, list[float]] = {one: [] for one in VARIANTS}
    wall: dict[str, list[float]] = {one: [] for one in VARIANTS}
    for _ in range(given.blocks):
        first, second = on_ranks(times, given.rounds)
        for a, b in zip(first, second, strict=True):
            for one in VARIANTS:
                cpu[one].append(a[one][0] + b[one][0])
                wall[one].append(max(a[one][1], b[one][1]))
    rows = ["| variant | CPU of a step | of torch's | time of a step | of torch's | between steps | at the peak |"]
    rows.append("| --- | --- | --- | --- | --- | --- | --- |")
    for one in VARIANTS:
        shown = []
        for kind in (cpu, wall):
            ratios = sorted(x / y for x, y in zip(kind[one], kind["torch"], strict=True))
            q1, middle, q3 = statistics.quantiles(ratios, n=4)
            shown += [f"{1e3 * statistics.median(kind[one]):.0f} ms", f"{middle:.3f} [{q1:.3f}, {q3:.3f}]"]
        taken = [on_ranks(memory, one)[0] for _ in range(3)]
        at = [f"{statistics.median(column):.2f} P" for column in zip(*taken, strict=True)]
        rows.append(f"| {one} | {' | '.join(shown + at)} |")
        print(rows[-1], flush=True)
    if given.out:
        about = __doc__.split("\n\n", 2)[2].strip().replace("\n", " ")
        command = f"`python benchmarks/fsdp.py --rounds {given.rounds} --blocks {given.blocks}`, torch {torch.__version__}, 2 CPUs."
        given.out.write_text(f"# A sharded model\n\n{command} {about}\n\n" + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
