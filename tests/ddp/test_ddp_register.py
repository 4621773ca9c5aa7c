"""Our hooks and pipelines inside torch's DistributedDataParallel: equal to one process, and to a train_step."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.ddp.register_problem import EVEN, HOOKS, SIZES, SMALL, check, samples
from tests.helpers import stepped
from tests.oracle import whole_batch
from tests.oracle.whole_batch import make_batches, make_model, mean_loss


def clipping(hook: str) -> Any:
    """The effect of a hook, apart from the mean, on a model's gradients."""
    params = {"mean, clip": (None, 0.1), "mean, two stages": (0.05, 0.1)}.get(hook)

    def clip(model: nn.Module) -> None:
        if params and params[0]:
            nn.utils.clip_grad_value_(model.parameters(), params[0])
        if params:
            nn.utils.clip_grad_norm_(model.parameters(), params[1])

    return clip


def train(
    sizes: list[list[int]], hook: str = "mean", fused: bool = True, join: str = "ours",
    options: dict[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Every sample counts once, whatever the ranks' batches."""
    ddp = DistributedDataParallel(make_model(), **(options or {}))
    if fused:
        handle = fjoin.ddp.register(ddp, tx.fuse(HOOKS[hook](), tx.adamw(0.05)))
        optimizers: list[Any] = []
    else:
        handle = fjoin.ddp.register(ddp, HOOKS[hook]())
        optimizers = [torch.optim.AdamW(ddp.parameters(), 0.05)]
    joinables = [ddp, *optimizers]
    contexts: dict[str, Any] = {
        "ours": lambda: fjoin.Join(joinables),
        "by live": lambda: fjoin.Join(joinables, divide_by_initial_world_size=False),
        "torch": lambda: TorchJoin([ddp]),
        "none": contextlib.nullcontext,
    }
    totals = []
    for _ in range(2):
        with contexts[join]():
            for batch in make_batches(1, sizes)[dist.get_rank()]:
                ddp.zero_grad()
                handle.weight(samples(batch))
                mean_loss(ddp, batch).backward()
                totals.append(handle.total)
                for optimizer in optimizers:
                    optimizer.step()
    return {path: p.detach().clone() for path, p in ddp.module.named_parameters()}, totals


def reference(sizes: list[list[int]], hook: str, epochs: int = 2) -> dict[str, Tensor]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    batches = make_batches(1, sizes)
    clip = clipping(hook)
    for _ in range(epochs):
        for i in range(max(map(len, batches))):
            live = [own[i] for own in batches if i < len(own)]
            total = sum(map(samples, live))
            optimizer.zero_grad()
            sum(mean_loss(model, b) * (samples(b) / total) for b in live).backward()
            clip(model)
            optimizer.step()
    return whole_batch.parameters(model)


ORACLES = ["mean", "mean, clip", "mean, two stages", "by hand"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", [{}, SMALL], ids=["one bucket", "many"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "hook"])
@pytest.mark.parametrize("hook", ORACLES)
def test_uneven_inputs_equal_one_process(pool: Any, hook: str, fused: bool, options: Any) -> None:
    """Three ranks train in fjoin.Join; one of them has no batch."""
    check(pool.run(3, train, SIZES, hook, fused, "ours", options), reference(SIZES, hook))


def test_the_divisor_of_a_join_has_no_effect(pool: Any) -> None:
    check(pool.run(3, train, SIZES, "mean", True, "by live", SMALL), reference(SIZES, "mean"))


@pytest.mark.parametrize("hook", ["mean", "by hand"])
def test_uneven_inputs_in_a_torch_join(pool: Any, hook: str) -> None:
    """A fused pipeline keeps all ranks equal there too: a rank without input takes the same steps."""
    check(
        pool.run(2, train, [[3, 2, 4, 1], [5, 1]], hook, True, "torch", SMALL), reference([[3, 2, 4, 1], [5, 1]], hook)
    )


@pytest.mark.sample(6)
@pytest.mark.parametrize("options", [SMALL, {**SMALL, "static_graph": True}, {**SMALL, "find_unused_parameters": True},
                                     {**SMALL, "gradient_as_bucket_view": False}], ids=str)  # fmt: skip
@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_what_it_is_in_a_train_step(pool: Any, hook: str, options: Any) -> None:
    """Clipping before the mean included, which one process cannot do: so against the simulation."""

    def one_rank(batches: list[Any]) -> Any:
        apply, params, _ = fjoin.functional(make_model())

        def loss_fn(params: Any, batch: Any) -> Tensor:
            return torch.nn.functional.cross_entropy(apply(params, {}, batch[0]), batch[1])

        step = fjoin.train_step(loss_fn, tx.fuse(HOOKS[hook](), tx.adamw(0.05)), weight=samples)
        state = step.init(params)
        for _ in range(2):
            state = stepped(step, state, step.join(batches))
        return {path: p.clone() for path, p in state.params.items()}

    want = tx.simulate(one_rank, {"data": 2}, make_batches(1, EVEN))[0]
    results = pool.run(2, train, EVEN, hook, True, "none", options)
    check(results, want)
    if hook not in ("by hand", "mean of mean"):  # whose last sum is not of the weights
        assert results[0][1] == [float(a + b) for a, b in zip(*EVEN, strict=True)] * 2, "the totals of the weights"
