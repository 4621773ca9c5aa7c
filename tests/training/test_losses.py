"""Losses that a step refuses on all ranks: that reach no parameter, and that communicate where a rank may be out of input."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from fjoin.transforms.sync import BatchNormState
from tests.helpers import raises_text, same_bits, stepped
from tests.training.small import MEAN_SGD

X, Y = torch.ones(4, 3), torch.zeros(4, dtype=torch.long)
SGD = tx.sgd(0.1)


def reported(run: Any) -> str:
    try:
        run()
    except (ValueError, fjoin.JoinError, fjoin.PeerLost) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# -- a loss that depends on other tensors than the given parameters trains nothing ---------------------


def make(calls_module: bool = True, hook: Any = None, mesh: Any = None, **settings: Any) -> Any:
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 2)
    apply, params, _ = fjoin.functional(copy.deepcopy(module))

    def loss(params: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(module(batch) if calls_module else apply(params, {}, batch), Y)

    step = fjoin.train_step(loss, tx.fuse(hook or tx.mean("data"), SGD), mesh=mesh, **settings)
    return step, step.init(params)


HOOKS = [
    tx.mean("data"), tx.compress(tx.int8(), tx.mean("data")), tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0)),
]  # fmt: skip


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("bucket_bytes", [1, 10**6])
@pytest.mark.parametrize("hook", HOOKS, ids=["mean", "int8", "clip"])
def test_a_loss_that_calls_another_module_is_refused(hook: Any, bucket_bytes: int, accumulate: int) -> None:
    step, state = make(hook=hook, bucket_bytes=bucket_bytes, accumulate=accumulate)
    before = state.clone()
    raises_text(ValueError, lambda: step(state, X), "no parameter has got a gradient", "apply(params, buffers, ...)")
    assert same_bits(state.params, before.params)


def refused_on_a_process(sizes: list[int]) -> str:
    mesh = fjoin.mesh({"data": -1}, timeout_s=30)
    step, state = make(mesh=mesh)
    return reported(lambda: stepped(step, state, step.join([X] * sizes[mesh.rank])))


@pytest.mark.parametrize("sizes", [[2, 2, 2], [0, 2, 1]], ids=str)
def test_it_is_refused_on_all_ranks(pool: Any, sizes: list[int]) -> None:
    texts = pool.run(3, refused_on_a_process, sizes)
    assert all("no parameter has got a gradient" in text for text in texts)
    assert all(text.startswith("PeerLost") for text, n in zip(texts, sizes, strict=True) if n == 0)


def test_ranks_and_steps_without_weight_and_later_steps_may_reach_none() -> None:
    """All terms of a loss may be switched off, for example."""

    def one_rank(n: int) -> int:
        step, state = make(calls_module=False, weight=lambda batch: float(batch.sum() > 0))
        return stepped(step, state, step.join([torch.zeros(4, 3), X, X][: n and n + 1])).step

    assert tx.simulate(one_rank, {"data": 3}, [2, 0, 1]) == [3, 3, 3]

    def loss(params: Any, batch: float) -> Any:
        return params["w"].sum() * batch if batch else torch.zeros((), requires_grad=True)

    step = fjoin.train_step(loss, tx.fuse(tx.mean("data"), tx.sgd(1.0)))
    state = stepped(step, step.init({"w": torch.zeros(2), "never": torch.zeros(1)}), (1.0, 0.0, 1.0))
    assert state.params["w"].tolist() == [-2.0, -2.0]


# -- parameters without a gradient on any rank are named once ------------------------------------------

START = {"w": torch.ones(3), "used by one": torch.ones(2), "never": torch.ones(2), "frozen": torch.ones(1)}
PLAIN, USES, ALL = (torch.ones(3), ["w"]), (torch.ones(3), ["w", "used by one"]), (torch.ones(3), [*START])
# By name: the batches of each rank, options, and words of the warning.
WARNED: dict[str, tuple[list[list[Any]], dict[str, int], list[str]]] = {
    "two": ([[PLAIN] * 3, [PLAIN, USES, PLAIN]], {}, ["2 parameters have got no gradient on any rank", "'frozen', 'never'"]),
    "three": ([[PLAIN] * 3, [PLAIN] * 3], {}, ["3 parameters", "'used by one'"]),
    "ranks without a batch": ([[PLAIN] * 3, [], []], {}, ["3 parameters"]),
    "used early in a window": ([[USES, PLAIN, PLAIN, PLAIN], [PLAIN] * 4], {"accumulate": 2}, ["2 parameters"]),
    "no batch at all": ([[], []], {}, []), "all are used": ([[ALL] * 2, [ALL], []], {}, []),
}  # fmt: skip


@pytest.mark.parametrize("name", WARNED)
def test_parameters_without_a_gradient_on_any_rank_are_named_once(name: str) -> None:
    ranks, options, words = WARNED[name]

    def run(batches: list[Any]) -> None:
        step = fjoin.train_step(lambda p, b: sum((p[path] * b[0].sum()).sum() for path in b[1]), MEAN_SGD, **options)
        state = step.init(START)
        for _ in range(2):  # epochs
            state = stepped(step, state, step.join(batches))

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        tx.simulate(run, {"data": len(ranks)}, ranks)
    assert len(found) == bool(words)
    assert all(word in str(found[0].message) for word in words)


# -- a loss that communicates, in a loop in which ranks without input do not call it -------------------

KINDS: dict[str, Any] = {
    "psum": lambda y: tx.psum(torch.ones(()), "data"),
    "several": lambda y: tx.psum((torch.ones(3), torch.ones(2)), "data")[0].mean(),
    "pmean": lambda y: 1 + tx.pmean(y.mean(0), "data").sum().square(),
    "pmax": lambda y: 1 + tx.pmax(y.detach().sum(), "data").square(),
    "all_gather": lambda y: 1 + tx.all_gather(y.sum(), "data").sum().square(),
    "psum_scatter": lambda y: 1 + tx.psum_scatter(y.sum().expand(2), "data").square(),
    "all_to_all": lambda y: 1 + tx.all_to_all(y.sum().expand(2), "data").sum().square(),
    "ppermute": lambda y: 1 + tx.ppermute(y.sum(), "data", [(0, 1)]).square(),
    "all_to_all_single": lambda y: 1 + tx.all_to_all_single(y, "data").sum().square(),
    "encoded": lambda y: 1 + tx.quantized(tx.all_gather, tx.int8())(y.detach().sum(1), "data").sum().square(),
    "batch norm": lambda y: (1 + tx.sync_batch_norm(y, BatchNormState(torch.zeros(4), torch.ones(4)), axis="data")[0].square().mean()),
}  # fmt: skip


def train(kind: Any, batches: int, mesh: Any = None, joined: bool = True, **join: Any) -> Any:
    """A loss over batches of four rows."""

    def loss(params: Any, x: Any) -> Any:
        y = x @ params["w"]
        assert 0 <= int(tx.axis_index("data")) < tx.axis_size("data") == 2
        return y.square().mean() / KINDS[kind](y) if kind else y.square().mean()

    step = fjoin.train_step(loss, tx.fuse(tx.mean("data"), tx.sgd(0.01)), mesh=mesh)
    rows = [torch.randn(4, 8) for _ in range(batches)]
    state = stepped(step, step.init({"w": torch.ones(8, 4)}), step.join(rows, **join) if joined else rows)
    return state.params["w"], state.step


@pytest.mark.parametrize("kind", KINDS)
def test_collectives_in_the_loss(kind: str) -> None:
    """They raise in a loop, on equal inputs too, and run with replay and outside a loop."""
    for batches in ([2, 1], [2, 2]):
        run = lambda: tx.simulate(lambda n: train(kind, n), {"data": 2}, batches)  # noqa: B023, E731
        raises_text(fjoin.JoinError, run, "'data'", "when_exhausted='replay'")
    replayed = tx.simulate(lambda n: train(kind, n, when_exhausted="replay"), {"data": 2}, [2, 1])
    outside = tx.simulate(lambda n: train(kind, n, joined=False), {"data": 2}, [2, 2])
    for out in (replayed, outside, tx.simulate(lambda n: train(None, n), {"data": 2}, [2, 1])):
        assert [n for _, n in out] == [2, 2] and torch.equal(out[0][0], out[1][0])


def communicates_on_a_process(kind: str, batches: list[int]) -> str:
    mesh = fjoin.mesh({"data": -1}, timeout_s=30)
    return reported(lambda: train(kind, batches[mesh.rank], mesh))


@pytest.mark.parametrize("batches", [[2, 1], [2, 2], [2, 0]], ids=str)
@pytest.mark.parametrize("kind", ["psum", "all_gather", "pmean"])
def test_on_processes_all_ranks_raise(pool: Any, kind: str, batches: list[int]) -> None:
    texts = pool.run(2, communicates_on_a_process, kind, batches)
    assert all("when_exhausted='replay'" in text for text in texts), texts


@pytest.mark.parametrize("axis", ["model", "data", ("data", "model"), ("model", "data")])
def test_collectives_over_other_axes_run(axis: Any) -> None:
    """Ranks along "model" have the same batches; those along "data" may run out alone."""

    def one_rank(batches: int) -> Any:
        mesh = fjoin.mesh({"data": 2, "model": 2})
        step = fjoin.train_step(lambda p, x: tx.psum(p["w"] * x, axis), tx.fuse(tx.mean("data"), SGD), mesh=mesh)
        return stepped(step, step.init({"w": torch.tensor(0.0)}, sync=None), step.join([1.0] * batches)).step

    def run() -> Any:
        return tx.simulate(one_rank, {"data": 2, "model": 2}, [2, 2, 1, 1])

    if axis == "model":
        assert run() == [2] * 4
    else:
        raises_text(fjoin.JoinError, run, "'data'", "replay")
