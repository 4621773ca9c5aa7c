"""A loss that communicates, in a loop in which ranks without input do not call it: refused on all ranks, in place of a hang."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from fjoin.transforms.sync import BatchNormState
from tests.helpers import raises_text, stepped

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


def train(kind: Any, batches: int, mesh: Any = None, **join: Any) -> Any:
    """A loss over batches of four rows."""

    def loss(params: Any, x: Any) -> Any:
        y = x @ params["w"]
        assert 0 <= int(tx.axis_index("data")) < tx.axis_size("data") == 2
        return y.square().mean() / KINDS[kind](y) if kind else y.square().mean()

    step = fjoin.train_step(loss, tx.fuse(tx.mean("data"), tx.sgd(0.01)), mesh=mesh)
    state = step.init({"w": torch.ones(8, 4)})
    state = stepped(step, state, step.join([torch.randn(4, 8) for _ in range(batches)], **join))
    return state.params["w"], state.step


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batches", [[2, 1], [2, 2]])
def test_collectives_in_the_loss_raise_in_the_simulator(kind: str, batches: list[int]) -> None:
    raises_text(
        fjoin.JoinError,
        lambda: tx.simulate(lambda n: train(kind, n), {"data": 2}, batches),
        "'data'",
        "when_exhausted='replay'",
    )


@pytest.mark.parametrize("kind", KINDS)
def test_collectives_in_the_loss_run_with_replay(kind: str) -> None:
    out = tx.simulate(lambda n: train(kind, n, when_exhausted="replay"), {"data": 2}, [2, 1])
    assert [n for _, n in out] == [2, 2] and torch.equal(out[0][0], out[1][0])


def test_loss_without_collectives_does_not_raise() -> None:
    out = tx.simulate(lambda n: train(None, n), {"data": 2}, [3, 1])
    assert [n for _, n in out] == [3, 3] and torch.equal(out[0][0], out[1][0])


def on_a_process(kind: str, batches: list[int]) -> str:
    mesh = fjoin.mesh({"data": -1}, timeout_s=30)
    kinds = (fjoin.JoinError, fjoin.PeerLost)
    try:
        train(kind, batches[mesh.rank], mesh)
    except kinds as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("batches", [[2, 1], [2, 2], [2, 0]], ids=str)
@pytest.mark.parametrize("kind", ["psum", "all_gather", "pmean"])
def test_on_processes_all_ranks_raise(pool: Any, kind: str, batches: list[int]) -> None:
    texts = pool.run(2, on_a_process, kind, batches)
    assert all("when_exhausted='replay'" in text for text in texts), texts


def outside_a_join(mesh: Any = None) -> Any:
    step = fjoin.train_step(
        lambda p, b: (p["w"] * b).sum() * tx.psum(torch.ones(()), "data"),
        tx.fuse(tx.mean("data"), tx.sgd(0.5)),
        mesh=mesh,
    )
    state, _ = step(step.init({"w": torch.zeros(2)}), 1.0)
    return state.params["w"].tolist()


def test_collectives_in_the_loss_run_outside_a_join() -> None:
    assert tx.simulate(outside_a_join, {"data": 2}) == [[-1.0, -1.0]] * 2


def over_another_axis(batches: int, axis: Any) -> Any:
    """Ranks along "model" have the same batches; those along "data" may run out alone."""
    mesh = fjoin.mesh({"data": 2, "model": 2})

    def loss(params: Any, x: Any) -> Any:
        return tx.psum(params["w"] * x, axis)

    step = fjoin.train_step(loss, tx.fuse(tx.mean("data"), tx.sgd(0.5)), mesh=mesh)
    state = stepped(step, step.init({"w": torch.tensor(0.0)}, sync=None), step.join([1.0] * batches))
    return state.step


def test_collectives_over_other_axes_run() -> None:
    shape, batches = {"data": 2, "model": 2}, [2, 2, 1, 1]
    assert tx.simulate(lambda n: over_another_axis(n, "model"), shape, batches) == [2] * 4
    for axis in ("data", ("data", "model"), ("model", "data")):
        run = lambda n, axis=axis: over_another_axis(n, axis)  # noqa: E731
        raises_text(fjoin.JoinError, lambda run=run: tx.simulate(run, shape, batches), "'data'", "replay")
