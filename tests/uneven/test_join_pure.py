"""Pure hooks in the generic Join, simulated and on processes, and its errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text


def joined_sum(inputs: list[float], throw: bool = False) -> Any:
    """A state renewed by pure functions: the sum of all inputs, and weights taken from the last joiner."""
    mesh = fjoin.mesh({"data": -1})
    total = fjoin.as_joinable(lambda start=0.0: tx.JoinHook(lambda s: s + tx.psum(0.0, "data")), 0.0, mesh=mesh)
    weights = fjoin.as_joinable(tx.broadcast_from_last("data"), torch.full((2,), float(mesh.rank)), mesh=mesh)
    with fjoin.Join([total, weights], throw_on_early_termination=throw, start=1.0) as join, fjoin.bind(mesh):
        for x in inputs:
            fjoin.Join.notify_join_context(total)
            total.state = total.state + tx.psum(x, "data")
    return float(total.state), weights.state.tolist(), join.last_joiner, join.iterations


def on_processes(inputs: list[list[float]]) -> Any:
    return joined_sum(inputs[dist.get_rank()])


@pytest.mark.parametrize(
    ("inputs", "last"), [([[1.0], [2.0, 3.0], [4.0, 5.0]], 1), ([[], [1.0]], 1), ([[], []], 0), ([[1.0, 2.0]] * 3, 0)]
)
def test_pure_hooks_simulated_and_real(pool: Any, inputs: list[list[float]], last: int) -> None:
    """Ties between last joiners go to the lowest rank, visibly; the simulation equals the processes."""
    most = max(map(len, inputs))
    want = [(sum(map(sum, inputs)), [last] * 2, last, most)] * len(inputs)
    assert tx.simulate(joined_sum, {"data": len(inputs)}, inputs) == want
    assert pool.run(len(inputs), on_processes, inputs) == want


def test_the_default_dtype_does_not_matter() -> None:
    """Bits for 12 ranks do not fit bfloat16."""

    def one_rank(n: int) -> Any:
        one = fjoin.as_joinable(tx.JoinHook())
        with fjoin.Join([one]) as join:
            for _ in range(n):
                fjoin.Join.notify_join_context(one)
        return join.last_joiner, join.iterations

    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert tx.simulate(one_rank, {"data": 12}, [1] * 9 + [3, 2, 3]) == [(9, 3)] * 12
    finally:
        torch.set_default_dtype(kept)


def test_a_barrier() -> None:
    """The end of a Join waits for all ranks, even if its joinable does nothing."""
    order: list[str] = []

    def one_rank(name: str) -> None:
        with fjoin.Join([fjoin.as_joinable(tx.JoinHook())]):
            order.append(f"{name} before")
        order.append(f"{name} after")

    tx.simulate(one_rank, {"data": 3}, ["a", "b", "c"])
    assert sorted(order[:3]) == ["a before", "b before", "c before"] and len(order) == 6


def test_work_once_after_all_have_ended() -> None:
    """A post hook runs once on each rank, after the last iteration of any rank."""
    log: list[str] = []

    def one_rank(n: int) -> None:
        def post(state: Any, is_last_joiner: bool) -> Any:
            log.append("post")
            return state

        one = fjoin.as_joinable(tx.JoinHook(post=post))
        for _ in range(2):  # epochs
            with fjoin.Join([one]):
                for _ in range(n):
                    fjoin.Join.notify_join_context(one)
                    log.append("step")

    tx.simulate(one_rank, {"data": 3}, [1, 3, 0])
    epoch = ["step"] * 4 + ["post"] * 3
    assert log == epoch * 2


def test_other_joinables_on_one_rank() -> None:
    def one_rank(n: int) -> str:
        mesh = fjoin.mesh({"data": -1})
        joinables = [fjoin.as_joinable(tx.JoinHook(), mesh=mesh) for _ in range(n)]
        return raises_text(
            fjoin.DesyncError,
            lambda: fjoin.Join(joinables).__enter__(),
            "rank 2 differs from rank 0 in its joinables",
            "same order",
        )

    assert len(tx.simulate(one_rank, {"data": 3}, [1, 1, 2])) == 3


def test_one_join_at_a_time() -> None:
    one = fjoin.as_joinable(tx.JoinHook())
    with fjoin.Join([one]):
        raises_text(fjoin.JoinError, lambda: fjoin.Join([one]).__enter__(), "inside another Join")
    with fjoin.Join([one]):
        pass


def test_the_configuration_is_reset_after_an_exception() -> None:
    one = fjoin.as_joinable(tx.JoinHook())
    before = one._join_config
    with pytest.raises(KeyError), fjoin.Join([one]):
        raise KeyError("mine")
    assert one._join_config is before
    fjoin.Join([one])  # not entered: nothing changes either
    assert one._join_config is before


def test_a_hook_that_is_none() -> None:
    raises_text(TypeError, lambda: fjoin.Join([fjoin.as_joinable(lambda: 3)]), "tx.JoinHook(main, post)", "3")
