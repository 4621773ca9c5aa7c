"""Whether everything works on a GPU, whether steps wait for it, and whether streams are in order."""

from __future__ import annotations

import os
import random
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fjoin
from fjoin import transforms as tx
from fjoin.buckets import GradBuffer
from fjoin.groups import GroupAxis

HOOKS: dict[str, Callable[[], Any]] = {
    "mean": lambda: tx.mean("data"),
    "clipped": lambda: tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0)),
    "bf16": lambda: tx.compress(torch.bfloat16, tx.mean("data")),
    "int8 fed back": lambda: tx.error_feedback(tx.compress(tx.int8(), tx.mean("data"))),
    "power_sgd": lambda: tx.error_feedback(tx.power_sgd("data", 4)),
    "masked": lambda: tx.masked(tx.mean("data"), "*.weight"),
    "left out": lambda: tx.skip_if_nonfinite(tx.mean("data")),
}


def say(mesh: Any, *what: Any) -> None:
    print(f"[{mesh.rank}]", *what, flush=True)


WRONG: list[str] = []  # what a check has found on this rank, which then ends with an error


def wrong(what: str) -> str:
    """Note that a check has failed."""
    WRONG.append(what)
    return what


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def net(device: str, widths: tuple[int, ...] = (512, 1024, 1024, 1024, 64)) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(device)


def batch_of(rank: int, step: int, device: str) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(64, 512, generator=g).to(device), torch.randint(0, 64, (64,), generator=g).to(device)


def loss_of(apply: Any, before: Callable[[], None] = lambda: None) -> Callable[[Any, Any], Tensor]:
    def loss(params: Any, batch: Any) -> Tensor:
        before()
        return F.cross_entropy(apply(params, {}, batch[0]), batch[1])

    return loss


def alive(args: Any, mesh: Any) -> None:
    """Collectives of all kinds, over all dtypes; the time of an all-reduce."""
    d, n, r = args.device, mesh.size, mesh.rank
    for kib in (1, 256, 5 * 1024, 25 * 1024):
        x = torch.ones(kib * 256, device=d)
        for _ in range(3):
            dist.all_reduce(x, group=mesh.group)
        synchronize(d)
        start = time.perf_counter()
        for _ in range(10):
            dist.all_reduce(x, group=mesh.group)
        synchronize(d)
        say(mesh, f"all_reduce {kib} KiB: {(time.perf_counter() - start) * 100:.3f} ms")
    for dtype in (torch.uint8, torch.int32, torch.int64, torch.float64, torch.bfloat16):
        with fjoin.bind(mesh):
            y = tx.all_gather(torch.full((3,), r, device=d).to(dtype), "data")
            z = tx.pmax(torch.full((3,), r, device=d).to(dtype), "data")
            s = tx.psum(torch.zeros(0, device=d), "data")
        assert y[:, 0].tolist() == list(range(n)) and z[0].item() == n - 1 and s.numel() == 0, dtype
    with fjoin.bind(mesh):
        sizes = [(r + i) % 2 for i in range(n)]
        given = torch.full((sum(sizes), 2), float(r), device=d)
        out = tx.all_to_all_single(given, "data", input_split_sizes=sizes, output_split_sizes=sizes)
        assert out[:, 0].tolist() == [float(i) for i in range(n) if sizes[i]]
        got = tx.ppermute(torch.full((2,), float(r), device=d), "data", [(0, n - 1)])
        assert got[0].item() == 0.0
    say(mesh, "dtypes, empty tensors, uneven splits, ppermute: right")


def sync(args: Any, mesh: Any) -> None:
    """Steps 4 to 9 do not synchronize; each place that does is named once."""
    apply, start, _ = fjoin.functional(net(args.device))
    for name, make in HOOKS.items():
        for opt in (tx.adamw(tx.warmup_cosine(1e-3, 2, 100)), tx.lion(1e-4)):
            step = fjoin.train_step(loss_of(apply), tx.fuse(make(), opt), mesh=mesh, weight=lambda b: float(len(b[1])))
            state = step.init(start)
            batches = [batch_of(mesh.rank, i, args.device) for i in range(10)]
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                for i, batch in enumerate(batches):
                    if i == 4 and args.device == "cuda":
                        said.clear()
                        torch.cuda.set_sync_debug_mode("warn")
                    state, metrics = step(state, batch)
                if args.device == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
            said = [one for one in said if "is a prototype feature" not in str(one.message)]  # of the mode itself
            if said:
                wrong("waits for the device")
            where = sorted({f"{os.path.basename(w.filename)}:{w.lineno} {str(w.message)[:60]}" for w in said})
            say(mesh, f"{name:14} {opt.spec.name:6} loss {metrics.loss:.4f} syncs {len(said)}", *where)
            step.close()


def race(args: Any, mesh: Any) -> None:
    """The same bits with delays and overwritten free memory as with a synchronization behind every launch."""
    apply, start, _ = fjoin.functional(net(args.device))
    begin_reduce, take, dice = GroupAxis.begin_reduce, GradBuffer.take, random.Random(mesh.rank)

    def run(make: Callable[[], Any], slow: bool) -> dict[str, Tensor]:
        def reduced(self: Any, buffer: Tensor) -> Any:
            work = begin_reduce(self, buffer)
            if slow:
                synchronize(args.device)
            return work

        def taken(self: Any, places: Any) -> None:
            take(self, places)
            if slow:
                synchronize(args.device)
            elif args.device == "cuda":
                torch.cuda._sleep(dice.randrange(200_000))  # up to about 0.1 ms
                for numel in (dice.randrange(1, 2**20), dice.randrange(1, 2**10)):
                    torch.full((numel,), float("nan"), device="cuda")  # in memory that was freed too early

        GroupAxis.begin_reduce, GradBuffer.take = reduced, taken  # type: ignore[method-assign]
        step = fjoin.train_step(loss_of(apply), tx.fuse(make(), tx.adamw(1e-3)), mesh=mesh, bucket_bytes=2**18)
        state = step.init(start)
        for i in range(args.steps):
            state, _ = step(state, batch_of(mesh.rank, i, args.device))
        out = {path: p.cpu() for path, p in state.params.items()}
        step.close()
        return out

    try:
        for name, make in HOOKS.items():
            fast, slow = run(make, False), run(make, True)
            off = max(float((fast[path] - slow[path]).abs().max()) for path in slow)
            finite = all(bool(p.isfinite().all()) for p in fast.values())
            say(
                mesh,
                f"{name:14} {'same bits' if off == 0 else wrong(f'DIFFERS by {off:g}')}{'' if finite else wrong(' NOT FINITE')}",
            )
    finally:
        GroupAxis.begin_reduce, GradBuffer.take = begin_reduce, take  # type: ignore[method-assign]
