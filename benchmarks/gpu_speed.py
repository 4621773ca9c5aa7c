"""The time, launches and memory of a step on a GPU, beside DistributedDataParallel with torch's fused AdamW."""

from __future__ import annotations

import copy
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import models
import torch
import torch.nn.functional as F
from gpu_checks import batch_of, net, say, synchronize
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fjoin
from fjoin import transforms as tx

MIB = 2**20


def _case(args: Any, small: bool) -> tuple[nn.Module, Callable[[Callable[[Tensor], Tensor]], Tensor]]:
    """A model, and its loss as a function of how the model is called."""
    d = args.device
    if small:
        x, y = batch_of(0, 0, d)
        return net(d), lambda call: F.cross_entropy(call(x), y)
    torch.manual_seed(0)
    model = models.Transformer(12, 768, 12, 16384).to(d)
    tokens = torch.randint(0, 16384, (8, 513), device=d)

    def loss(call: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.autocast(d, torch.bfloat16):
            return F.cross_entropy(call(tokens[:, :-1]), tokens[:, 1:].flatten())

    return model, loss


def _variants(args: Any, mesh: Any, small: bool) -> dict[str, Callable[[], Callable[[], None]]]:
    """Name -> a function that builds a function that takes one step."""
    model, loss = _case(args, small)

    def ddp(view: bool) -> Callable[[], None]:
        module = nn.parallel.DistributedDataParallel(
            copy.deepcopy(model), gradient_as_bucket_view=view, process_group=mesh.group
        )
        opt = torch.optim.AdamW(module.parameters(), 1e-4, fused=True)

        def one() -> None:
            loss(module).backward()
            opt.step()
            opt.zero_grad()

        return one

    def registered() -> Callable[[], None]:
        module = nn.parallel.DistributedDataParallel(
            copy.deepcopy(model), gradient_as_bucket_view=True, process_group=mesh.group
        )
        fjoin.ddp.register(module, tx.fuse(mean, adamw), mesh)
        return lambda: loss(module).backward()

    def donate() -> Callable[[], None]:
        apply, params, _ = fjoin.functional(model)
        grad = fjoin.value_and_grad(lambda params: loss(lambda x: apply(params, {}, x)))
        pipeline = tx.fuse(mean, adamw)
        state = pipeline.init(params)

        def one() -> None:
            nonlocal params, state
            with fjoin.bind(mesh):
                params, state = pipeline.step(params, grad(params)[1], state, donate=True)

        return one

    def ours(mib: int, hook: Any, opt: Any) -> Callable[[], None]:
        apply, start, _ = fjoin.functional(model)
        loss_fn = lambda params, batch: loss(lambda x: apply(params, {}, x))  # noqa: E731
        step = fjoin.train_step(loss_fn, tx.fuse(hook, opt), mesh=mesh, bucket_bytes=mib * MIB)
        state = step.init(start)

        def one() -> None:
            nonlocal state
            state, _ = step(state, None)

        return one

    mean, adamw = tx.mean("data"), tx.adamw(1e-4)
    return {
        "ddp": lambda: ddp(False),
        "ddp, views": lambda: ddp(True),
        "fjoin": lambda: ours(5, mean, adamw),
        "fjoin, 25 MiB": lambda: ours(25, mean, adamw),
        "registered": registered,
        "donate": donate,
        "schedule": lambda: ours(25, mean, tx.adamw(tx.warmup_cosine(1e-4, 10, 1000))),
        "clip": lambda: ours(25, tx.chain(mean, tx.clip_by_global_norm(1.0)), adamw),
        "bf16 wire": lambda: ours(25, tx.compress(torch.bfloat16, mean), adamw),
        "int8 fed back": lambda: ours(25, tx.error_feedback(tx.compress(tx.int8(), mean)), adamw),
        "zero": lambda: ours(25, tx.scatter_mean("data"), adamw),
    }


def _rows(args: Any, mesh: Any) -> Iterator[tuple[bool, str, Callable[[], Callable[[], None]]]]:
    """The rows that --rows names, or all, of each model: whether it is the small one, which is the only one on CPUs; name; variant."""
    for small in (True, False) if args.device == "cuda" else (True,):
        for name, make in _variants(args, mesh, small).items():
            if not args.rows or name.replace(", ", " ") in args.rows.split(","):
                yield small, name, make


def bench(args: Any, mesh: Any) -> None:
    """Medians of the time of a step, of its time on the host alone, and the most memory."""
    rows = {}
    for small, name, make in _rows(args, mesh):
        base = 0
        if args.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
        one = make()
        for _ in range(5):
            one()
        wall, host = [], []
        for _ in range(args.steps):
            synchronize(args.device)
            start = time.perf_counter()
            one()
            host.append(time.perf_counter() - start)  # from an idle device: the host is not held back
        for _ in range(5):
            synchronize(args.device)
            start = time.perf_counter()
            for _ in range(args.steps):
                one()
            synchronize(args.device)
            wall.append((time.perf_counter() - start) / args.steps)
        peak = torch.cuda.max_memory_allocated() - base if args.device == "cuda" else 0
        row = [1e3 * f(wall) for f in (statistics.median, min, max)] + [1e3 * statistics.median(host), peak / MIB]
        rows[f"{'mlp' if small else '110M'}: {name}"] = row
        if mesh.rank == 0:
            print(
                f"{'mlp' if small else '110M':5} {name:14} step {row[0]:8.3f} ms [{row[1]:.3f} {row[2]:.3f}]"
                f"  host {row[3]:7.3f} ms  peak {row[4]:6.0f} MiB",
                flush=True,
            )
        del one
    if mesh.rank == 0 and args.out:
        with open(args.out, "w") as file:
            json.dump(rows, file, indent=1)


def launches(args: Any, mesh: Any) -> None:
    """Kernel launches, copies, messages and waits in one step, by torch's profiler."""
    for small, name, make in _rows(args, mesh):
        one = make()
        for _ in range(5):
            one()
        synchronize(args.device)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
            for _ in range(3):
                one()
            synchronize(args.device)
        seen = Counter(event.name for event in prof.events())

        def of(*keys: str, seen: Counter[str] = seen) -> float:
            return sum(n for event, n in seen.items() if any(key in event for key in keys)) / 3

        if mesh.rank == 0:
            print(
                f"{'mlp' if small else '110M':5} {name:14} launches {of('LaunchKernel'):7.1f}"
                f" memcpy {of('cudaMemcpyAsync'):5.1f} nccl {of('ncclDevKernel'):5.1f}"
                f" waits of the host {of('StreamSynchronize', 'DeviceSynchronize', 'EventSynchronize'):4.1f}"
                f" of streams {of('StreamWaitEvent'):6.1f}",
                flush=True,
            )
        del one


def graph(args: Any, mesh: Any) -> None:
    """What capturing a whole step would give: one flat buffer, its all-reduce and fused AdamW, eager and as a CUDA graph."""
    for small in (True, False):
        d = args.device
        model, loss = _case(args, small)
        numel = sum(p.numel() for p in model.parameters())
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # leaves made here have their nodes in the stream of the capture
            flat = torch.cat([p.detach().view(-1) for p in model.parameters()])
            grads, count = torch.zeros(numel, device=d), torch.zeros((), device=d)
            mu, nu, scale = torch.zeros_like(flat), torch.zeros_like(flat), torch.full((), float(mesh.size), device=d)
            at, leaves, places = 0, {}, []
            for path, p in model.named_parameters():
                leaves[path] = flat[at : at + p.numel()].view(p.shape).detach().requires_grad_()
                places.append(grads[at : at + p.numel()].view(p.shape))
                at += p.numel()

            def one(
                model: Any = model, loss: Any = loss, leaves: Any = leaves, places: Any = places, flat: Any = flat,
                grads: Any = grads, mu: Any = mu, nu: Any = nu, count: Any = count, scale: Any = scale,
            ) -> None:  # fmt: skip
                value = loss(lambda x: torch.func.functional_call(model, leaves, (x,)))
                torch._foreach_copy_(places, list(torch.autograd.grad(value, list(leaves.values()))))
                torch.distributed.all_reduce(grads, group=mesh.group)
                bad = (~torch.isfinite(torch.linalg.vector_norm(grads, float("inf")))).float()
                count.add_(1)
                torch._fused_adamw_(
                    [flat], [grads], [mu], [nu], [], [count], lr=1e-4, beta1=0.9, beta2=0.999, weight_decay=0.01,
                    eps=1e-8, amsgrad=False, maximize=False, grad_scale=scale, found_inf=bad,
                )  # fmt: skip
                count.sub_(bad)

            for _ in range(12):
                one()
            eager = _timed(one, args.steps, d)
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured, stream=side, capture_error_mode="thread_local"):
                one()
            replayed = _timed(captured.replay, args.steps, d)
        say(mesh, f"{'mlp' if small else '110M'}: one flat buffer, eager {eager:.3f} ms, as a graph {replayed:.3f} ms")


def _timed(run: Callable[[], None], times: int, device: str) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(times):
        run()
    synchronize(device)
    return (time.perf_counter() - start) / times * 1e3
