"""A registered module: steps that are left out, errors raised by backward, refused arguments."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fjoin
from fjoin import transforms as tx
from tests.ddp.register_problem import EVEN, SMALL, Branches
from tests.helpers import raises_text, same_bits
from tests.oracle.whole_batch import make_batches, make_model, mean_loss


def nonfinite(skips: bool) -> Any:
    ddp = DistributedDataParallel(make_model(), **SMALL)
    pipeline = tx.fuse(tx.mean("data"), tx.adamw(0.05))
    handle = fjoin.ddp.register(ddp, tx.skip_if_nonfinite(pipeline) if skips else pipeline)
    reported = ""
    for i, (x, y) in enumerate(make_batches(1, EVEN)[dist.get_rank()]):
        before = {path: p.detach().clone() for path, p in ddp.module.named_parameters()}
        ddp.zero_grad()
        bad = x * float("nan") if i == 1 and dist.get_rank() == 1 else x
        try:
            mean_loss(ddp, (bad, y)).backward()
        except Exception as error:
            reported = f"{type(error).__name__}: {error}"
        if i == 1:
            assert same_bits(before, dict(ddp.module.named_parameters()))
            if not skips:
                break
    return reported, handle.step, handle.skipped


def test_a_step_that_is_not_finite(pool: Any) -> None:
    """All ranks skip the step, or all raise in backward."""
    assert pool.run(2, nonfinite, True) == [("", 3, 1)] * 2
    for reported, step, _ in pool.run(2, nonfinite, False):
        assert "NonFinite" in reported and "step 1" in reported and "unchanged" in reported and step == 2


def failing() -> Any:
    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        raise KeyError("no such thing")

    ddp = DistributedDataParallel(make_model(), **SMALL)
    fjoin.ddp.register(ddp, tx.Transform(lambda params: (), update, needs=tx.Needs.LEAVES))
    try:
        mean_loss(ddp, make_batches(1, [[3], [3]])[0][0]).backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_an_exception_in_a_hook_comes_out_of_backward(pool: Any) -> None:
    """Torch's fused hook loses the exception (H2)."""
    assert all("no such thing" in reported for reported in pool.run(2, failing))


def refused() -> Any:
    ddp = DistributedDataParallel(make_model())
    for make, kind, texts in [
        (lambda: fjoin.ddp.register(ddp.module, tx.mean("data")), TypeError, ["DistributedDataParallel", "Sequential"]),
        (lambda: fjoin.ddp.register(ddp, tx.sgd(0.1)), TypeError, ["transform or a pipeline", "sgd(lr=0.1)"]),
        (lambda: fjoin.ddp.register(ddp, tx.chain(tx.mean("a"), tx.mean("b"))), ValueError, ["['a', 'b']", "mesh="]),
        (lambda: fjoin.ddp.register(ddp, tx.mean("data"), fjoin.mesh({"data": 1})), ValueError, ["1"]),
        (lambda: fjoin.ddp.register(ddp, tx.fuse(tx.mean("data"), tx.muon())), ValueError, ["matrices only"]),
    ]:  # fmt: skip
        raises_text(kind, make, *texts)
    raises_text(
        fjoin.DesyncError,
        lambda: fjoin.ddp.register(ddp, tx.chain(tx.mean("data"), tx.clip_by_value(1.0 + dist.get_rank()))),
        "rank 1 differs from rank 0 in its hook", "clip_by_value(2.0)", "clip_by_value(1.0)",
    )  # fmt: skip
    handle = fjoin.ddp.register(ddp, tx.fuse(tx.mean("data"), tx.adamw(0.1)))
    raises_text(ValueError, lambda: fjoin.ddp.register(ddp, tx.mean("data")), "already")
    raises_text(ValueError, lambda: handle.weight(-1.0), "-1.0")
    for bad in (float("nan"), 1e-46, 1e39, torch.tensor(-1.0), torch.ones(2)):
        raises_text(ValueError, lambda: handle.weight(bad), "weight must be")  # noqa: B023
    raises_text(TypeError, lambda: handle.weight("1"), "'1'")  # type: ignore[arg-type]
    other = fjoin.ddp.register(DistributedDataParallel(make_model()), tx.fuse(tx.identity(), tx.sgd(0.1)))
    raises_text(ValueError, lambda: other.load_state_dict(handle.state_dict()), "the state of '0.weight'", "exp_avg")
    return True


def test_raises_on_bad_input(pool: Any) -> None:
    assert all(pool.run(2, refused))


def goes_on() -> Any:
    """After a NonFinite from backward, and after gradients taken outside the module."""
    ddp = DistributedDataParallel(Branches(), find_unused_parameters=True, **SMALL)
    handle = fjoin.ddp.register(ddp, tx.fuse(tx.mean("data"), tx.adamw(0.05, weight_decay=0.5)))
    kinds = []
    for x, which in ((1.0, [0]), (float("nan"), [0, 1]), (2.0, [0]), (3.0, [0])):
        torch.autograd.grad(ddp.module(torch.ones(1, 3).double(), [2]), list(ddp.module.branches[2].parameters()))
        try:
            ddp.zero_grad(set_to_none=True)
            ddp(torch.full((1, 3), x).double(), which).backward()
            kinds.append("fine")
        except fjoin.NonFinite as error:
            kinds.append(f"{error.step}")
    moved = [
        not same_bits(p.detach(), q.detach())
        for p, q in zip(ddp.module.parameters(), Branches().parameters(), strict=True)
    ]
    return kinds, moved, handle.step


def test_a_module_goes_on_after_an_error(pool: Any) -> None:
    for kinds, moved, step in pool.run(2, goes_on):
        assert kinds == ["fine", "1", "fine", "fine"] and step == 4
        assert moved == [True, True, False, False, False, False, False, False], "what was used in no step is left alone"


def refused_later() -> bool:
    table = DistributedDataParallel(nn.Embedding(3, 2, sparse=True))
    fjoin.ddp.register(table, tx.mean("data"))
    raises_text(TypeError, lambda: table(torch.tensor([0])).sum().backward(), "sparse=False")
    spectrum = nn.ParameterDict({"w": torch.ones(2, dtype=torch.complex64)})
    stepped = tx.fuse(tx.mean("data"), tx.sgd(0.1))
    raises_text(TypeError, lambda: fjoin.ddp.register(DistributedDataParallel(spectrum), stepped), "'w' has complex dtype")  # fmt: skip
    fjoin.ddp.register(DistributedDataParallel(spectrum), tx.mean("data"))
    ddp = DistributedDataParallel(make_model())
    raises_text(ValueError, lambda: fjoin.ddp.register(ddp, tx.accumulate(2, tx.mean("data"))), "no_sync()")
    handle = fjoin.ddp.register(
        ddp, tx.fuse(tx.chain(tx.mean("data"), tx.every(2, tx.clip_by_value(1.0))), tx.adamw(0.1))
    )
    mean_loss(ddp, make_batches(1, EVEN)[0][0]).backward()
    saved = handle.state_dict()
    raises_text(ValueError, lambda: handle.load_state_dict({"hook": {}}), "got ['hook']", "'optimizer'")
    first = next(iter(saved["optimizer"]))
    bad = {
        **saved,
        "optimizer": {**saved["optimizer"], first: {**saved["optimizer"][first], "exp_avg": torch.zeros(1)}},
    }
    raises_text(ValueError, lambda: handle.load_state_dict(bad), "'exp_avg'", "shape (1,)")
    bad["optimizer"][first] = {**saved["optimizer"][first], "step": torch.tensor(-1.0)}
    raises_text(ValueError, lambda: handle.load_state_dict(bad), repr(first), "step is -1.0")
    turned = {**saved, "hook": dict(reversed(saved["hook"].items()))}
    handle.load_state_dict(turned)
    assert same_bits(handle.state_dict()["hook"], saved["hook"]) and same_bits(handle.state_dict(), saved)
    return True


def test_raises_on_bad_parameters_and_states(pool: Any) -> None:
    assert all(pool.run(2, refused_later))
