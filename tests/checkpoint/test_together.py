"""Several steps, and what each rank carries beside them, are saved as one; parameters are frozen and unfrozen between two runs."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fjoin
from fjoin import transforms as tx

MEAN = tx.mean("data")
DATA = torch.randn(8, 3, 4, 2, generator=torch.Generator().manual_seed(1))  # (calls, ranks, samples, features)
BOTH = {"generator": {"w": torch.ones(2)}, "critic": {"w": torch.ones(2), "v": torch.zeros(3)}}


class Carried:
    """A value of this rank."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def adversaries() -> dict[str, Any]:
    """A sharded step, a pipeline, and a number that each rank carries."""

    def loss(params: Any, batch: Any) -> Tensor:
        x, other = batch
        return ((x * params["w"]).sum(1) - other["w"].sum() + params["v"].sum()).square().mean()

    step = fjoin.train_step(loss, tx.zero(MEAN, tx.adam(0.1), "data"), weight=lambda batch: len(batch[0]))
    return {"critic": step, "generator": tx.fuse(MEAN, tx.sgd(0.1, momentum=0.9)), "seen": Carried(0.0)}


def duel(folder: Path, rank: int, ranks: int, calls: range) -> dict[str, Any]:
    """The critic takes two steps in each call, the generator one; saved after the last call."""
    parts = adversaries()
    runs = fjoin.Checkpoints(folder, parts)
    states = runs.restore(BOTH)
    for call in calls:
        x = DATA[call].flatten(0, 1)[rank::ranks]
        for _ in range(2):
            states["critic"], _ = parts["critic"](states["critic"], (x, states["generator"][0]))
        w = dict(states["critic"].params)["w"].clone()
        grads = torch.func.grad(lambda p, x=x, w=w: ((x * w).sum(1) - p["w"].sum()).square().mean())(
            states["generator"][0]
        )
        with fjoin.bind(fjoin.mesh({"data": -1})):
            states["generator"] = parts["generator"].step(states["generator"][0], grads, states["generator"][1])
        parts["seen"].value += float(rank)
    runs.save(states)
    return {
        "critic": {path: value.clone() for path, value in states["critic"].params.items()},
        "generator": states["generator"][0],
        "seen": parts["seen"].value,
        "steps": (states["critic"].step, states["generator"][1].step),
    }


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(torch.equal(one[part][path], other[part][path]) for part in BOTH for path in BOTH[part])


@pytest.mark.parametrize("ranks", [1, 2])
def test_parts_of_one_loop_resume_together(ranks: int, tmp_path: Path) -> None:
    def runs(folder: str, *cuts: range) -> list[dict[str, Any]]:
        for calls in cuts:
            found = tx.simulate(
                lambda rank, calls=calls: duel(tmp_path / folder, rank, ranks, calls), {"data": ranks}, [*range(ranks)]
            )
        return list(found)

    uncut, resumed = runs("uncut", range(8)), runs("cut", range(3), range(3, 8))
    for rank, (one, other) in enumerate(zip(uncut, resumed, strict=True)):
        assert same(one, other) and other["seen"] == 8.0 * rank and other["steps"] == (16, 8)
    assert [path.name for path in sorted((tmp_path / "cut").iterdir())] == ["step-00000006", "step-00000016"]
    assert fjoin.checkpoint.verify(tmp_path / "cut") == []


def test_what_each_rank_carries_is_of_as_many_ranks(tmp_path: Path) -> None:
    tx.simulate(lambda rank: duel(tmp_path, rank, 2, range(3)), {"data": 2}, [0, 1])
    with pytest.raises(fjoin.CheckpointError, match="numbers of their own"):
        fjoin.load(tmp_path, adversaries(), BOTH)


def test_without_parameters_a_load_gives_those_of_each_part(tmp_path: Path) -> None:
    saved = duel(tmp_path, 0, 1, range(3))
    states = fjoin.load(tmp_path, adversaries())
    assert same(saved, {"critic": states["critic"].params, "generator": states["generator"][0]})


def test_two_folders_of_one_loop_that_are_from_other_places_warn(tmp_path: Path) -> None:
    """As after a crash between the two saves, also before the first save of the second."""

    def run(folder: str, saves: int, until: int) -> None:
        steps = [fjoin.train_step(lambda p, x: (p["w"] * x).sum(), tx.fuse(MEAN, tx.sgd(0.1))) for _ in range(2)]
        loop = fjoin.join(torch.utils.data.DataLoader(torch.ones(4), batch_sampler=fjoin.Shuffled(4, 1)), steps=steps)
        both = [fjoin.Checkpoints(tmp_path / folder / str(i), step) for i, step in enumerate(steps)]
        states = [runs.restore({"w": torch.ones(1)}, data=loop) for runs in both]
        for batch in loop:
            for i, (step, runs) in enumerate(zip(steps, both, strict=True)):
                states[i], _ = step(states[i], batch)
                if i < saves:
                    runs.save(states[i], data=loop)
            if states[0].step == until:
                break

    def apart(*args: Any) -> bool:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            run(*args)
        return any("save what one loop trains as one" in str(one.message) for one in found)

    assert not apart("first", 1, 1) and apart("first", 0, 2)
    assert not apart("second", 2, 1) and not apart("second", 1, 2) and apart("second", 0, 3)


# -- freezing ------------------------------------------------------------------------------------------------------------------------


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def loss_of(net: Any, x: Tensor) -> Tensor:
    return (net(x) - x.sum(1, keepdim=True)).square().mean()


def halves() -> list[Tensor]:
    return [DATA[at : at + 4].double() for at in (0, 4)]


def in_torch(frozen: tuple[bool, bool]) -> nn.Sequential:
    """The first layer has an optimizer of its own, which steps where the layer is not frozen."""
    model = net()
    optimizers = [torch.optim.Adam(model[i].parameters(), 0.01) for i in (2, 0)]
    for held, half in zip(frozen, halves(), strict=True):
        for x in half.flatten(1, 2):
            model.zero_grad()
            loss_of(model, x).backward()
            for optimizer in optimizers[: 1 if held else 2]:
                optimizer.step()
    return model


@pytest.mark.parametrize("make", [tx.fuse, tx.zero])
@pytest.mark.parametrize("frozen", [(True, False), (False, True), (True, True)], ids=["thaw", "freeze", "neither"])
def test_a_layer_is_frozen_or_not_when_a_run_goes_on(frozen: tuple[bool, bool], make: Any, tmp_path: Path) -> None:
    def half(number: int, rank: int, fresh: tuple[str, ...], one: bool) -> dict[str, Tensor]:
        model = net()
        with torch.no_grad():
            model[0].weight.mul_(1 - number)  # the values at the start of a run are nothing to one that goes on
        model[0].requires_grad_(not frozen[number])
        adam = tx.adam(0.01) if one or frozen[number] else tx.partition({"0.*": tx.adam(0.01), "*": tx.adam(0.01)})
        pipeline = make(MEAN, adam, *(["data"] if make is tx.zero else []))
        apply, params, buffers = fjoin.functional(model)
        step = fjoin.train_step(lambda p, b, x: (loss_of(lambda x: apply(p, b, x), x), None, b), pipeline)
        runs = fjoin.Checkpoints(tmp_path, step)
        state = runs.restore(params, buffers, fresh=fresh)
        for x in halves()[number]:
            state, _ = step(state, x[rank])
        runs.save(state)
        return {**(state.buffers or {}), **state.clone().params}

    def on_three(number: int, *fresh: str, one: bool = False) -> list[dict[str, Tensor]]:
        return tx.simulate(lambda rank: half(number, rank, fresh, one), {"data": 3}, [0, 1, 2])

    on_three(0)
    fresh = ["pipeline.optimizer.0"] if frozen[0] != frozen[1] else []
    if fresh:
        with pytest.raises(fjoin.CheckpointError, match=r"0\.weight.*not here.*fresh="):  # the optimizer's state of it
            on_three(1)
    if frozen == (True, False):
        with pytest.raises(ValueError, match=r"steps, and .* another number.*tx\.partition"):
            on_three(1, *fresh, one=True)
    expected = {path: value.detach() for path, value in in_torch(frozen).named_parameters()}
    for found in on_three(1, *fresh):
        assert found.keys() == expected.keys()
        assert all(torch.allclose(found[path], expected[path], atol=1e-12, rtol=0) for path in found)


@pytest.mark.parametrize("first", ["critic", "generator"])
def test_a_signal_ends_the_loop_of_any_step(first: str, tmp_path: Path) -> None:
    """Whichever step has joined the loader; the ranks save after the same step."""
    steps = {
        name: fjoin.train_step(lambda p, x: (p["w"] * x).sum(), tx.fuse(MEAN, tx.sgd(0.1)))
        for name in sorted(("critic", "generator"), key=lambda name: name != first)
    }
    with fjoin.Checkpoints(tmp_path, steps, every_s=float("inf")) as runs:
        states = runs.restore(dict.fromkeys(steps, {"w": torch.ones(1)}))
        loop = steps["critic"].join([torch.ones(1)] * 20)
        metrics = {}
        for i, batch in enumerate(loop):
            for name, step in steps.items():
                states[name], metrics[name] = step(states[name], batch)
            runs.save(states, metrics[first])
            if i == 3:
                signal.raise_signal(signal.SIGTERM)
    assert loop.stopped and 5 <= states["critic"].step <= 9 and len(list(tmp_path.glob("step-*"))) == 1
