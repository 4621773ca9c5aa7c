"""Training loops written by hand in plain torch, with the semantics of fjoin's, as floors of what a step may cost; and counts per step.

    python benchmarks/floors.py tiny 1m             counts: Python frames, aten calls, MB copied, messages, switches given up;
                                                    and how far four steps end from those of DDP, and the ranks from each other
    python benchmarks/run.py --only "shared tiny"   times, in the same rounds as fjoin and DDP

The loops keep parameters, gradients and AdamW's state in flat buffers where their semantics allow it, send one message,
and check nothing.
"""

from __future__ import annotations

import resource
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import models
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

LR, DECAY = 1e-3, 1e-2
Variant = tuple[Callable[[int], None], Callable[[], list[Tensor]]]
Sum = Callable[[Tensor], Tensor]  # over the ranks; in place where it can


def summed(flat: Tensor) -> Tensor:
    dist.all_reduce(flat)
    return flat


def in_shared_memory(axis: Any) -> Sum:
    """The sum over one host's ranks, by fjoin's axis, since torch has none."""

    def sum_(flat: Tensor) -> Tensor:
        axis.begin_reduce(flat).wait()
        return flat

    return sum_


def adamw(params: list[Tensor], grads: list[Tensor], state: Sequence[Any]) -> None:
    """torch's fused AdamW on lists; `state` holds exp_avg, exp_avg_sq and the steps."""
    exp_avgs, exp_avg_sqs, steps = state
    torch._foreach_add_(steps, 1)
    numbers: dict[str, Any] = {"lr": LR, "beta1": 0.9, "beta2": 0.999, "weight_decay": DECAY, "eps": 1e-8}
    torch._fused_adamw_(params, grads, exp_avgs, exp_avg_sqs, [], steps, amsgrad=False, maximize=False, **numbers)


def state_of(params: list[Tensor]) -> list[list[Tensor]]:
    return [
        [torch.zeros_like(p) for p in params],
        [torch.zeros_like(p) for p in params],
        [torch.zeros(()) for _ in params],
    ]


def views(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    return [part.view_as(one) for part, one in zip(flat.split([one.numel() for one in like]), like, strict=True)]


def train_step(name: str, batch: Any, sum_: Sum) -> Variant:
    """Leaves in one flat buffer, whose gradients are copied into another one behind backward."""
    x, y = batch
    model, share = models.model(name), 1 / dist.get_world_size()
    params = list(model.parameters())
    flat, grad = torch.cat([p.detach().reshape(-1) for p in params]), torch.zeros(sum(p.numel() for p in params))
    for p, view in zip(params, views(flat, params), strict=True):
        p.data = view
    places, state = views(grad, params), state_of([flat])

    def run(n: int) -> None:
        nonlocal grad
        for _ in range(n):
            F.cross_entropy(model(x), y).mul(share).backward()
            with torch.no_grad():
                torch._foreach_copy_(places, [p.grad for p in params])
                for p in params:
                    p.grad = None
                adamw([flat], [sum_(grad)], state)

    return run, lambda: params


def registered(name: str, batch: Any, sum_: Sum) -> Variant:
    """A DistributedDataParallel whose communication hook sums a bucket, and steps its parameters then."""
    x, y = batch
    model, share = DistributedDataParallel(models.model(name), gradient_as_bucket_view=True), 1 / dist.get_world_size()
    lists = state_of([p.detach() for p in model.parameters()])
    states = dict(zip([p.data_ptr() for p in model.parameters()], zip(*lists, strict=True), strict=True))

    def step(bucket: Any, total: Tensor) -> Tensor:
        params = [p.detach() for p in bucket.parameters()]
        own = zip(*[states[p.data_ptr()] for p in params], strict=True)  # DDP cuts other buckets after the first pass
        adamw(params, views(total, params), [*map(list, own)])
        return bucket.buffer()

    def hook(_: Any, bucket: Any) -> Any:
        buffer = bucket.buffer().mul_(share)
        if sum_ is summed:
            return dist.all_reduce(buffer, async_op=True).get_future().then(lambda done: step(bucket, done.value()[0]))
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(step(bucket, sum_(buffer)))
        return future

    model.register_comm_hook(None, lambda state, bucket: hook(state, bucket))  # torch refuses annotations as text

    def run(n: int) -> None:
        for _ in range(n):
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()

    return run, lambda: list(model.parameters())


def own_loop(name: str, batch: Any, sum_: Sum, donate: bool, func: bool = False) -> Variant:
    """Gradients of the model as a function, by torch.func or plain autograd, and a step in place or on copies."""
    x, y = batch
    model, share = models.model(name), 1 / dist.get_world_size()
    params: dict[str, Tensor] = {path: p.detach().clone() for path, p in model.named_parameters()}
    state = state_of([*params.values()])

    def loss_fn(params: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, params, (x,)), y)

    def grads_of(params: dict[str, Tensor]) -> list[Tensor]:
        if func:
            return [*torch.func.grad(loss_fn)(params).values()]
        leaves = {path: p.detach().requires_grad_() for path, p in params.items()}
        return [*torch.autograd.grad(loss_fn(leaves), [*leaves.values()])]

    def run(n: int) -> None:
        nonlocal params, state
        for _ in range(n):
            grads = grads_of(params)
            total = sum_(torch.cat([grad.reshape(-1) for grad in grads]).mul_(share))
            if not donate:
                params = {path: p.clone() for path, p in params.items()}
                state = [[one.clone() for one in part] for part in state]
            adamw([*params.values()], views(total, grads), state)

    return run, lambda: [*params.values()]


LOOPS: dict[str, Callable[[str, Any, Sum], Variant]] = {
    "hand": train_step,
    "hand registered": registered,
    "hand donate": lambda *a: own_loop(*a, donate=True),
    "hand pure": lambda *a: own_loop(*a, donate=False, func=True),
    "hand pure autograd": lambda *a: own_loop(*a, donate=False),
}


# -- counts ------------------------------------------------------------------------------------------------------------


def counts(run: Callable[[int], None], steps: int) -> dict[str, float]:
    """Of one steady step on this rank."""
    run(6)
    found: Counter[str] = Counter()

    def called(frame: Any, event: str, arg: Any) -> None:
        found["frames"] += event == "call"

    dist.barrier()
    before = resource.getrusage(resource.RUSAGE_SELF)
    run(steps)
    switches = (resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before.ru_nvcsw) / steps
    sys.setprofile(called)
    try:
        run(steps)
    finally:
        sys.setprofile(None)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiled:
        run(steps)
    for event in profiled.events():
        found["aten"] += event.name.startswith("aten::")
        found["messages"] += event.name.startswith("c10d::")
        if event.name in ("aten::copy_", "aten::_foreach_copy_") and event.input_shapes and event.input_shapes[0]:
            found["bytes"] += 4 * torch.Size(event.input_shapes[0]).numel()
    per_step = {name: found[name] / steps for name in ("frames", "aten", "messages")}
    return {**per_step, "MB": found["bytes"] / steps / 1e6, "switches": switches}


ROWS = (
    "ddp", "hand", "ours", "hand registered", "ddp our hook", "hand donate", "donate", "hand pure autograd", "hand pure", "pure",
    "shared", "shared our hook", "shared donate", "shared pure",
)  # fmt: skip


def main() -> None:
    from launch import launch

    print("| model | variant | Python frames | aten calls | MB copied | messages | switches | off DDP | ranks apart |")
    print("|---|---|---|---|---|---|---|---|---|")
    for model in sys.argv[1:] or ("tiny",):
        rank = launch("count", model, 4, ROWS)[0]
        for name, row in rank.items():
            shown = " | ".join(
                f"{row[key]:.4g}" for key in ("frames", "aten", "MB", "messages", "switches", "off", "apart")
            )
            print(f"| {model} | {name} | {shown} |")


if __name__ == "__main__":
    main()
