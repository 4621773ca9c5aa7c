"""Hooks and pipelines inside torch's DistributedDataParallel: any context and option, errors that backward raises, refused arguments.

tests/test_places.py compares the pipelines themselves.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.ddp.register_problem import EVEN, HOOKS, SIZES, SMALL, Branches, check, samples
from tests.helpers import raises_text, same_bits
from tests.oracle import whole_batch
from tests.oracle.whole_batch import make_batches, make_model, mean_loss


def train(sizes: list[list[int]], hook: str, fused: bool, join: str, options: dict[str, Any]) -> Any:
    """Every sample counts once, whatever the ranks' batches."""
    ddp = DistributedDataParallel(make_model(), **options)
    handle = fjoin.ddp.register(ddp, tx.fuse(HOOKS[hook](), tx.adamw(0.05)) if fused else HOOKS[hook]())
    optimizers = [] if fused else [torch.optim.AdamW(ddp.parameters(), 0.05)]
    contexts: dict[str, Any] = {
        "ours": lambda: fjoin.Join([ddp, *optimizers]), "torch": lambda: TorchJoin([ddp]), "none": contextlib.nullcontext,
        "by live": lambda: fjoin.Join([ddp, *optimizers], divide_by_initial_world_size=False),
    }  # fmt: skip
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


def reference(sizes: list[list[int]], hook: str) -> dict[str, Tensor]:
    """One process on the batches of all."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    for _ in range(2):
        whole_batch.train(model, optimizer, make_batches(1, sizes), clip=0.1 if hook == "mean, clip" else None)
    return whole_batch.parameters(model)


TWO = [[3, 2, 4, 1], [5, 1]]
VIEWS, STATIC = {"gradient_as_bucket_view": True}, {"static_graph": True}
# Batches, hook, whether it has an optimizer, context, options. In a torch Join a rank without input takes the same steps.
ROWS: list[tuple[Any, ...]] = [
    *((SIZES, hook, fused, "ours", SMALL) for hook in ("mean", "mean, clip") for fused in (True, False)),
    (SIZES, "mean", True, "by live", SMALL), *((TWO, hook, True, "torch", SMALL) for hook in ("mean", "by hand")),
    *((EVEN, hook, True, "none", {**SMALL, **options}) for hook in ("mean, clip", "by hand") for options in (VIEWS, STATIC)),
]  # fmt: skip


@pytest.mark.parametrize("row", range(len(ROWS)), ids=lambda i: "-".join(map(str, ROWS[i][1:])))
def test_it_equals_one_process(pool: Any, row: int) -> None:
    sizes, hook, *_ = ROWS[row]
    results = pool.run(len(sizes), train, *ROWS[row])
    check(results, reference(sizes, hook))
    if sizes is EVEN and hook != "by hand":  # whose last sum is not of the weights
        assert results[0][1] == [float(a + b) for a, b in zip(*EVEN, strict=True)] * 2, "the totals of the weights"


# -- errors --------------------------------------------------------------------------------------------


def failing() -> str:
    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        raise KeyError("no such thing")

    ddp = DistributedDataParallel(make_model(), **SMALL)
    fjoin.ddp.register(ddp, tx.Transform(lambda params: (), update, needs=tx.Needs.LEAVES))
    return raises_text(Exception, mean_loss(ddp, make_batches(1, [[3], [3]])[0][0]).backward, "no such thing")


def goes_on(skips: bool) -> Any:
    """After a NonFinite from backward, or a pass that is left out, and after gradients taken outside the module."""
    ddp = DistributedDataParallel(Branches(), find_unused_parameters=True, **SMALL)
    pipeline = tx.fuse(tx.mean("data"), tx.adamw(0.05, weight_decay=0.5))
    handle = fjoin.ddp.register(ddp, tx.skip_if_nonfinite(pipeline) if skips else pipeline)
    kinds = []
    for x, which in ((1.0, [0]), (float("nan") if dist.get_rank() == 1 else 1.0, [0, 1]), (2.0, [0]), (3.0, [0])):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of gradients without a step
            torch.autograd.grad(ddp.module(torch.ones(1, 3).double(), [2]), list(ddp.module.branches[2].parameters()))
        try:
            ddp.zero_grad(set_to_none=True)
            ddp(torch.full((1, 3), x).double(), which).backward()
            kinds.append("fine")
        except fjoin.NonFinite as error:
            assert "unchanged" in str(error)
            kinds.append(f"{error.step}")
    moved = [
        not same_bits(p.detach(), q.detach())
        for p, q in zip(ddp.module.parameters(), Branches().parameters(), strict=True)
    ]
    return kinds, moved, handle.step, handle.skipped


def test_errors_come_out_of_backward_and_a_module_goes_on(pool: Any) -> None:
    """All ranks leave the pass out, or all raise. What was used in no step is left alone."""
    pool.run(2, failing)
    for skips in (True, False):
        want = ["fine", "fine" if skips else "1", "fine", "fine"], [True, True, *[False] * 6], 4, int(skips)
        assert pool.run(2, goes_on, skips) == [want] * 2


def refused() -> None:
    ddp, register = DistributedDataParallel(make_model()), fjoin.ddp.register
    mean = tx.mean("data")
    for what, kind, *texts in (
        ((tx.sgd(0.1),), TypeError, "transform or a pipeline", "sgd(lr=0.1)"),
        ((tx.chain(tx.mean("a"), tx.mean("b")),), ValueError, "['a', 'b']", "mesh="),
        ((tx.fuse(mean, tx.muon()),), ValueError, "matrices only"),
        ((tx.accumulate(2, mean),), ValueError, "no_sync()"),
        ((tx.chain(mean, tx.clip_by_value(1.0 + dist.get_rank())),), fjoin.DesyncError,
         "rank 1 differs from rank 0 in its hook", "clip_by_value(2.0)", "clip_by_value(1.0)"),
    ):  # fmt: skip
        raises_text(kind, lambda: register(ddp, *what), *texts)  # noqa: B023
    hook = tx.chain(mean, tx.every(2, tx.clip_by_value(1.0)))
    handle = register(ddp, tx.fuse(hook, tx.adamw(0.1)))
    raises_text(ValueError, lambda: register(ddp, mean), "already")
    for bad in (-1.0, float("nan"), 1e-46, 1e39, torch.tensor(-1.0), torch.ones(2)):
        raises_text(ValueError, lambda: handle.weight(bad), "weight must be")  # noqa: B023
    raises_text(TypeError, lambda: handle.weight("1"), "'1'")  # type: ignore[arg-type]
    # -- states
    other = register(DistributedDataParallel(make_model()), tx.fuse(hook, tx.sgd(0.1)))
    raises_text(ValueError, lambda: other.load_state_dict(handle.state_dict()), "the state of '0.weight'", "exp_avg")
    mean_loss(ddp, make_batches(1, EVEN)[0][0]).backward()
    saved = handle.state_dict()
    first = next(iter(saved["optimizer"]))

    def changed(**fields: Any) -> Any:
        return {**saved, "optimizer": {**saved["optimizer"], first: {**saved["optimizer"][first], **fields}}}

    for state, *texts in (
        ({"hook": {}}, "got ['hook']", "'optimizer'"), (changed(exp_avg=torch.zeros(1)), "'exp_avg'", "shape (1,)"),
        (changed(step=torch.tensor(-1.0)), repr(first), "step is -1.0"),
    ):  # fmt: skip
        raises_text(ValueError, lambda: handle.load_state_dict(state), *texts)  # noqa: B023
    handle.load_state_dict({**saved, "hook": dict(reversed(saved["hook"].items()))})
    assert same_bits(handle.state_dict(), saved)
    # -- parameters
    table = DistributedDataParallel(nn.Embedding(3, 2, sparse=True))
    register(table, mean)
    raises_text(TypeError, lambda: table(torch.tensor([0])).sum().backward(), "sparse=False")
    spectrum = DistributedDataParallel(nn.ParameterDict({"w": torch.ones(2, dtype=torch.complex64)}))
    raises_text(TypeError, lambda: register(spectrum, tx.fuse(mean, tx.sgd(0.1))), "'w' has complex dtype")
    register(spectrum, mean)


def test_raises_on_bad_input(pool: Any) -> None:
    pool.run(2, refused)
