"""Failures on a GPU: one rank fails while its device is behind its host."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu_checks import batch_of, loss_of, net, say, synchronize, wrong
from torch import Tensor

import fjoin
from fjoin import transforms as tx


def fail(args: Any, mesh: Any) -> None:
    """Rank 1 raises in its fourth step."""
    _failing(args, mesh, "fail")


def late(args: Any, mesh: Any) -> None:
    """Rank 1 sleeps in its fourth step until it is killed, once rank 0 has ended."""
    _failing(args, mesh, "late")


def first(args: Any, mesh: Any) -> None:
    """Rank 1 fails before its first message."""
    _failing(args, mesh, "first")


def _failing(args: Any, mesh: Any, when: str) -> None:
    apply, start, _ = fjoin.functional(net(args.device))
    calls = 0

    def before() -> None:
        nonlocal calls
        calls += 1
        if mesh.rank == 1 and calls == 4 and when == "fail":
            raise ValueError("bad batch")
        if mesh.rank == 1 and calls == 4 and when == "late":
            time.sleep(3600)
        if args.device == "cuda":
            torch.cuda._sleep(int(2e9))  # about a second: the device is a step behind the host

    step = fjoin.train_step(loss_of(apply, before), tx.fuse(tx.mean("data"), tx.sgd(0.1)), mesh=mesh)
    began, state, done = time.monotonic(), None, 0
    try:
        state = step.init(start, sync=None if when == "first" else "broadcast")
        batches = [batch_of(mesh.rank, i, args.device) for i in range(8)]
        if when == "first" and mesh.rank == 1:

            class Loader:
                def __iter__(self) -> Any:
                    raise ValueError("no data")

            for _ in step.join(Loader()):
                pass
        for i in range(8):
            state, _ = step(state, batches[i])
            done, began = i + 1, time.monotonic()
    except Exception as error:
        say(
            mesh, f"after {done} steps and {time.monotonic() - began:.1f} s: {type(error).__name__}: {str(error)[:160]}"
        )
    else:
        wrong("no error")
    if state is not None:
        try:
            mine = {path: p.cpu() for path, p in state.params.items()}
            want = _one_process(apply, start, done, mesh.size, args.device)
            off = max(float((mine[path] - want[path]).abs().max()) for path in want)
            say(
                mesh,
                f"the state of step {done} is off by {off:g} from one process{'' if off < 1e-4 else wrong(': GARBAGE')}",
            )
        except fjoin.FjoinError as error:
            say(mesh, f"the state says {type(error).__name__}: {str(error)[:100]}")
    time.sleep(args.after)  # in which torch's own threads may end the process
    say(mesh, f"alive {args.after} s later")


def _one_process(apply: Any, start: Any, steps: int, ranks: int, device: str) -> dict[str, Tensor]:
    params = {path: p.detach().clone().requires_grad_() for path, p in start.items()}
    for i in range(steps):
        loss = torch.zeros((), device=device)
        for rank in range(ranks):
            x, y = batch_of(rank, i, device)
            loss = loss + F.cross_entropy(apply(params, {}, x), y) / ranks
        grads = torch.autograd.grad(loss, list(params.values()))
        params = {
            path: (p - 0.1 * g).detach().requires_grad_() for (path, p), g in zip(params.items(), grads, strict=True)
        }
    return {path: p.detach().cpu() for path, p in params.items()}


def two(args: Any, mesh: Any) -> None:
    """A mesh is taken down whose two communicators each have a message that never ends."""
    both = fjoin.mesh({"node": 1, "local": -1}, timeout_s=args.timeout)
    xs = [torch.ones(2**16, device=args.device) for _ in range(2)]
    groups = [both.axes["local"].group, both.group]
    for x, group in zip(xs, groups, strict=True):
        dist.all_reduce(x, group=group)
    synchronize(args.device)
    if mesh.rank == 0:
        for x, group in zip(xs, groups, strict=True):
            dist.all_reduce(x, group=group, async_op=True)
        time.sleep(2)  # both messages are on the device, which no event can tell: they never end
        began = time.monotonic()
        both.report_failure(ValueError("x"), 0)
        say(mesh, f"taken down in {time.monotonic() - began:.1f} s")
    else:
        time.sleep(args.after)  # it takes part in nothing, and its connections stay open
