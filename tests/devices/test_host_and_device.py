"""A device decides on a step as the host does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.helpers import judged


def stepped(slope: float, on_device: bool) -> Any:
    """The parameters after a step with this gradient, clipped; or the name of its error."""
    pipeline = tx.fuse(tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0)), tx.sgd(1.0))
    step = judged(fjoin.train_step(lambda p, batch: (p["w"] * batch).sum(), pipeline), on_device)
    state = step.init({"w": torch.zeros(3)})
    try:
        state, _ = step(state, torch.full((3,), slope))
        step.close()
    except fjoin.NonFinite:
        return "NonFinite"
    return state.params["w"].tolist()


# The squares of the last one overflow.
@pytest.mark.parametrize("slope", [0.5, 1e18, torch.nan, torch.inf, 1e25])
def test_a_device_decides_as_the_host(slope: float) -> None:
    host = stepped(slope, False)
    assert stepped(slope, True) == (host if isinstance(host, str) else pytest.approx(host))


@pytest.mark.parametrize("name", ["lion", "adagrad", "rmsprop", "muon", "adadelta"])
@pytest.mark.parametrize("bad", [0.0, 1.0])
def test_a_bad_step_changes_nothing_and_another_one_is_as_without_the_flag(name: str, bad: float) -> None:
    opt = getattr(tx, name)(0.1)
    torch.manual_seed(0)
    params = [torch.randn(4, 4) for _ in range(5)]
    grads = [torch.full((4, 4), torch.nan) if bad else torch.randn(4, 4) for _ in params]

    def run(found_inf: Tensor | None) -> tuple[list[Tensor], list[float]]:
        own, states = [p.clone() for p in params], opt.init(params)  # they share the count
        opt.step_params_(own, [g.clone() for g in grads], states, found_inf=found_inf)
        return own, [float(x.double().sum()) for state in states for x in state if x is not None]

    flagged, plain = run(torch.tensor(bad)), run(None)
    same = all(map(torch.equal, flagged[0], params if bad else plain[0]))
    assert same and flagged[1][0] == 1.0 - bad and (flagged[1] == plain[1]) != bool(bad)
