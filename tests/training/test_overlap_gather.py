"""Parameters whose gathers are under way after a step: every use waits, and no other."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fjoin
from fjoin import transforms as tx
from fjoin.groups.axes._axis import GroupAxis
from tests.helpers import raises_text


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 65), nn.Linear(65, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh()) * self.scale


def made(pipeline: tx.Pipeline, loss: Any = None, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    apply, params, _ = fjoin.functional(Net())

    def whole(params: Any, x: Tensor) -> Any:
        return apply(params, {}, x)[0].square().mean(), {"kept": params["scale"]}

    options = {"bucket_bytes": 1024, "overlap_gather": True, **options}
    step = fjoin.train_step(loss or whole, pipeline, weight=len, **options)
    return step, step.init(params)


def sharded() -> tx.Pipeline:
    return tx.zero(tx.mean("data"), tx.adamw(1e-2), "data")


class Late:
    """A gather that fills its buffer only where it is waited for."""

    def __init__(self, flat: Tensor, work: Any, log: list[Any]) -> None:
        self._work, self._flat, self._log = work, flat, log
        work.wait()
        self._new = flat.clone()
        flat.fill_(torch.nan)  # what a reader sees who does not wait

    def wait(self) -> None:
        self._log.append(len(self._flat))
        self._flat.copy_(self._new)


def late(log: list[Any], make: Callable[..., Any] = Late) -> None:
    """Delay the gathers of this process."""
    gather_ = GroupAxis.begin_gather
    GroupAxis.begin_gather = lambda self, flat, sizes, rank: make(flat, gather_(self, flat, sizes, rank), log)  # type: ignore[assignment,method-assign]


def restored(run: Callable[..., Any]) -> Callable[..., Any]:
    """The function of one rank, which leaves `GroupAxis` as it was."""

    def one_rank(*args: Any) -> Any:
        gather_ = GroupAxis.begin_gather
        try:
            return run(*args)
        finally:
            GroupAxis.begin_gather = gather_  # type: ignore[method-assign]

    return one_rank


def train(overlap: bool, options: dict[str, Any]) -> Any:
    log: list[Any] = []
    if overlap:
        late(log)
    step, state = made(sharded(), overlap_gather=overlap, **options)
    gen, kept = torch.Generator().manual_seed(step.rank), []
    data = [torch.randn(2 + i % 2, 8, generator=gen) for i in range(6 - step.rank % 2)]
    for batch in step.join(data):
        state, metrics = step(state, batch)
        kept.append(metrics.aux and metrics.aux["kept"])
    return copy.deepcopy(state).params, state.clone().pipeline, kept, len(log)


def trained(*args: Any) -> Any:
    return restored(train)(*args)


@pytest.mark.gloo
@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"donate": False}, {"accumulate": 2}], ids=str)
def test_results_do_not_change(pool: Any, ranks: int, options: dict[str, Any]) -> None:
    want, got = (pool.run(ranks, trained, overlap, options) for overlap in (False, True))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one[:3], other[:3], rtol=0, atol=0)
        assert (one[3] > 0) == (ranks > 1)


def order() -> Any:
    log: list[Any] = []
    late(log)
    step, state = made(sharded())
    net = Net()

    def loss(params: Any, x: Tensor) -> Tensor:
        log.append("first")
        x = torch.nn.functional.linear(x, params["first.weight"], params["first.bias"]).tanh()
        log.append("last")
        return (torch.nn.functional.linear(x, params["last.weight"]) * params["scale"]).square().mean()

    step, state = made(sharded(), loss)
    sizes = [p.numel() for p in net.parameters()]
    state, _ = step(state, torch.ones(2, 8))
    assert log == ["first", "last"], "no gather is waited for in the step"
    del log[:]
    step(state, torch.ones(2, 8))
    assert sizes and log[0] == "first"
    return log


def ordered() -> Any:
    return restored(order)()


@pytest.mark.gloo
def test_a_gather_is_waited_for_at_its_use(pool: Any) -> None:
    for log in pool.run(2, ordered):
        at = log.index("last")
        assert 0 < len([x for x in log[:at] if x != "first"]) < len(log) - 2, log


def read(how: str) -> bool:
    late([])
    step, state = made(sharded())
    state, _ = step(state, torch.ones(2, 8))
    values = {
        "params": lambda: state.params,
        "clone": lambda: state.clone().params,
        "pipeline": lambda: (state.pipeline, state._body.storage.flats),
        "deepcopy": lambda: copy.deepcopy(state).params,
        "flush": lambda: step.flush(state).params,
    }[how]()
    return all(bool(torch.isfinite(x).all()) for x in torch.utils._pytree.tree_leaves(values) if isinstance(x, Tensor))


def read_alone(how: str) -> bool:
    return bool(restored(read)(how))


@pytest.mark.parametrize("how", ["params", "clone", "pipeline", "deepcopy", "flush"])
def test_every_read_waits(pool: Any, how: str) -> None:
    assert pool.run(2, read_alone, how) == [True, True]


def torn(where: str) -> None:
    class Lost(Late):
        def wait(self) -> None:
            raise RuntimeError("connection lost")

    step, state = made(sharded())
    state, _ = step(state, torch.ones(2, 8))
    late([], Lost)
    state, _ = step(state, torch.ones(2, 8))
    read: Any = (lambda: state.params) if where == "read" else lambda: step(state, torch.ones(2, 8))
    try:
        read()
    except (RuntimeError, fjoin.FjoinError) as error:
        assert "connection lost" in str(error)
    else:
        raise AssertionError("no error")
    raises_text(fjoin.TornState, lambda: state.params, "not arrived")


def torn_alone(where: str) -> None:
    restored(torn)(where)


@pytest.mark.gloo
@pytest.mark.parametrize("where", ["read", "forward"])
def test_a_gather_that_fails_leaves_a_torn_state(pool: Any, where: str) -> None:
    pool.run(2, torn_alone, where)


def transformed(how: str) -> Any:
    """A loss that uses the parameters past `__torch_function__`."""
    late([])

    def plain(params: Any, x: Tensor) -> Tensor:
        return (x @ params["first.weight"].T).square().mean() * params["scale"]

    def inner(params: Any, x: Tensor) -> Tensor:
        grads = torch.func.grad(plain)(params, x)
        return plain({path: p - 0.1 * grads[path] for path, p in params.items()}, x)

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return x @ w.T

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, w = ctx.saved_tensors
            return grad @ w, grad.T @ x

    def constant(params: Any, x: Tensor) -> Tensor:
        factor = torch.func.grad(lambda w: w.square().sum())(params["first.weight"]).detach()
        return (factor * params["first.weight"]).mean() + params["scale"]

    losses: dict[str, Any] = {
        "compiled": torch.compile(plain, backend="eager"),
        "torch.func": inner,
        "torch.func, a constant": constant,
        "a function of one's own": lambda params, x: Own.apply(x, params["first.weight"]).square().mean(),  # type: ignore[no-untyped-call]
        "checkpoint": lambda params, x: checkpoint(plain, params, x, use_reentrant=False),
        "reentrant": lambda params, x: checkpoint(
            lambda w: (x @ w.T).square().mean(), params["first.weight"], use_reentrant=True
        ),
    }
    loss = losses[how]
    found = []
    for overlap in (False, True):
        step, state = made(sharded(), loss, overlap_gather=overlap)
        state, _ = step(state, torch.ones(2, 8))
        state, _ = step(state, torch.ones(2, 8))
        found.append(dict(state.params))
    return found


def transformed_alone(how: str) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute")  # the compiler reads it
        return restored(transformed)(how)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "how", ["compiled", "torch.func", "torch.func, a constant", "a function of one's own", "checkpoint", "reentrant"]
)
def test_what_bypasses_torch_function_waits_too(pool: Any, how: str) -> None:
    for found in pool.run(2, transformed_alone, how):
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def decays() -> Any:
    """A stage of buckets before the reduction reads a parameter that the loss does not use."""

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return {path: grad + 0.1 * params[path] for path, grad in grads.items()}, state

    late([])
    decay = tx.Transform(lambda params: (), update, tx.Needs.LEAVES)
    found = []
    for overlap in (False, True):
        pipeline = tx.fuse(tx.chain(decay, tx.scatter_mean("data")), tx.sgd(0.1))
        loss = lambda params, x: (x @ params["first.weight"].T).square().mean()  # noqa: E731
        step, state = made(pipeline, loss, overlap_gather=overlap)
        for _ in range(3):
            state, _ = step(state, torch.ones(2, 8))
        found.append(dict(state.params))
    return found


def decays_alone() -> Any:
    return restored(decays)()


def test_stages_before_the_reduction_get_parameters_that_have_arrived(pool: Any) -> None:
    for found in pool.run(2, decays_alone):
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_overlap_without_a_gather_is_refused() -> None:
    for pipeline in (
        tx.fuse(tx.mean("data"), tx.sgd(0.1)),
        tx.fuse(tx.scatter_mean("data"), tx.sgd(0.1), gather=tx.int8()),
    ):
        raises_text(
            ValueError, lambda pipeline=pipeline: fjoin.train_step(len, pipeline, overlap_gather=True), "overlap_gather"
        )
