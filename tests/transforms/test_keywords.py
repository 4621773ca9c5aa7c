"""The keywords that a stage of one's own gets: those that it names, with these values, wherever it stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from tests.changed_weights import with_weights
from tests.helpers import stepped


def stage(seen: list[Any], extra: bool = False) -> tx.Transform:
    """It names each keyword, or has **extra; it keeps what it gets, as a dict."""

    def saw(grads: Any, state: Any, params: Any, **got: Any) -> Any:
        assert params is not None
        seen.append(got)
        return grads, state

    def names_all(
        grads: Any, state: Any, params: Any = None, *, weight: Any = None, step: Any = None,
        persistent: bool = False, flush: bool = False, donated: bool = False, sharded_over: Any = None,
    ) -> Any:  # fmt: skip
        given = {"weight": weight, "step": step, "persistent": persistent, "flush": flush}
        return saw(grads, state, params, **given, donated=donated, sharded_over=sharded_over)

    return tx.Transform(lambda params: (), saw if extra else names_all, tx.Needs.NOTHING)


def _same(weight: Any) -> Any:
    return weight


BEFORE: dict[str, Callable[[tx.Transform], tx.Transform]] = {
    "alone": lambda t: t, "chain": lambda t: tx.chain(t, tx.mean("data")), "masked": lambda t: tx.masked(t, "w"),
    "partition": lambda t: tx.partition({"w": t, "*": tx.identity()}), "every": lambda t: tx.every(1, t),
    "switch_after": lambda t: tx.switch_after(0, tx.identity(), t), "inner": lambda t: with_weights(_same, t),
    "in two": lambda t: with_weights(_same, tx.masked(tx.every(1, t), "w")),
    "fed back": lambda t: tx.error_feedback(tx.chain(t, tx.compress(tx.int8(), tx.mean("data")))),
    "cast": lambda t: tx.compress(torch.bfloat16, tx.chain(t, tx.mean("data"))),
    "coded": lambda t: tx.compress(tx.int8(), tx.chain(t, tx.mean("data"))), "accumulate": lambda t: tx.accumulate(1, t),
}  # fmt: skip
BEHIND: dict[str, Callable[[tx.Transform], tx.Transform]] = {
    "chain": lambda t: tx.chain(tx.mean("data"), t),
    "masked": lambda t: tx.chain(tx.mean("data"), tx.masked(t, "w")),
    "inner": lambda t: with_weights(_same, tx.chain(tx.mean("data"), t)),
    "every": lambda t: tx.chain(tx.compress(tx.int8(), tx.mean("data")), tx.every(1, t)),
}


def start() -> dict[str, torch.Tensor]:
    return {"w": torch.ones(2), "b": torch.ones(3)}


def purely(pipeline: tx.Pipeline) -> None:
    params: Any = start()
    state = pipeline.init(params)
    for _ in range(2):
        params, state = pipeline.step(params, start(), state, weight=2.0)
    pipeline.flush(params, state)


def by_step(pipeline: tx.Pipeline) -> None:
    step = fjoin.train_step(lambda p, b: sum((v * b).sum() for v in p.values()), pipeline, weight=lambda b: 2.0)
    state = stepped(step, step.init(start()), [1.0] * 2)
    step.flush(state)


def calls_of(run: Callable[[tx.Pipeline], None], make: Callable[[tx.Transform], tx.Pipeline]) -> list[dict[str, Any]]:
    """What a stage that names all keywords gets, on the first of two ranks; one with **extra gets no `flush` and `donated`."""
    named, extra = [], []
    for mine in (named, extra):
        seen: list[list[Any]] = [mine, []]
        tx.simulate(lambda rank: run(make(stage(seen[rank], mine is extra))), {"data": 2}, [0, 1])  # noqa: B023
    for a, b in zip([call for call in named if not call["flush"]], extra, strict=True):
        assert float(a["weight"]) == float(b["weight"]) and a["step"] == b["step"]
        assert a["persistent"] == b.get("persistent", False) and a["sharded_over"] == b.get("sharded_over")
    return named


SGD = tx.sgd(0.1)
Place = tuple[Callable[[tx.Transform], tx.Pipeline], dict[str, list[Any]]]
RANKS_OWN = {
    "weight": [2.0] * 2, "step": [0, 1], "persistent": [False] * 2, "flush": [False] * 2, "sharded_over": [None] * 2,
}  # fmt: skip
OF_ALL = {"weight": [4.0, 4.0, 0.0], "step": [0, 1, 2], "persistent": [True] * 3, "flush": [False, False, True]}
# Where a stage stands, and what it gets in two steps and a flush: before the reduction its rank's weight, and no flush; behind it
# the sum of both ranks' weights; at the end that too, and a flush of weight 0.
PLACES: dict[str, Place] = {
    **{f"before, {name}": (lambda t, wrap=wrap: tx.fuse(wrap(t), SGD), RANKS_OWN) for name, wrap in BEFORE.items()},
    **{f"behind, {name}": (lambda t, wrap=wrap: tx.fuse(wrap(t), SGD), {"weight": [4.0] * 2, "step": [0, 1]}) for name,
     wrap in BEHIND.items()},
    **{
        f"at the end, {name}": (lambda t, name=name: tx.fuse(tx.mean("data"), SGD, after=BEFORE[name](t)), OF_ALL)
        for name in ("alone", "masked", "partition", "every", "switch_after", "in two")
    },
    **{
        f"of pieces, {name}": (
            lambda t, name=name: tx.fuse(tx.chain(tx.scatter_mean("data"), BEFORE[name](t)), SGD),
            {"sharded_over": ["data", "data"], "weight": [4.0, 4.0]},
        )
        for name in ("alone", "every")
    },
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("run", [purely, by_step])
@pytest.mark.parametrize("place", PLACES)
def test_what_a_stage_gets(place: str, run: Any) -> None:
    make, want = PLACES[place]
    if "accumulate" in place and run is by_step:  # which has an argument of its own
        return
    calls = calls_of(run, make)
    for name, values in want.items():
        assert [float(call[name]) if name == "weight" else call[name] for call in calls] == values, name


@pytest.mark.parametrize("name", [*BEFORE, *(f"behind {name}" for name in BEHIND)])
def test_donated(name: str) -> None:
    """Only the first stage may write into the gradients, if the caller donates them, and no wrapper around it uses them again."""
    wrap = BEHIND[name.removeprefix("behind ")] if "behind" in name else BEFORE[name]
    writes = name in ("alone", "chain", "partition", "switch_after", "fed back", "cast", "coded")
    for donate in (False, True):
        seen: list[Any] = []
        pipeline = tx.fuse(wrap(stage(seen)), tx.sgd(0.1))
        with fjoin.bind(fjoin.mesh({"data": -1})):
            pipeline.step(start(), start(), pipeline.init(start()), donate=donate)
        assert [call["donated"] for call in seen] == [donate and writes]


def _multiplies(grads: Any, state: Any, params: Any = None, *, weight: Any = None, **extra: Any) -> Any:
    """Uses the weight itself, and does not hand it on."""
    return INNER.update(grads * weight, state, params, **extra)


def _pops(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
    extra.pop("weight")
    return INNER.update(grads, state, params, **extra)


INNER = tx.mean("data")


@pytest.mark.parametrize(("update", "expected"), [(_multiplies, (1 * 1 + 4 * 3) / 2), (_pops, (1 + 4) / 2)])
def test_wrapper_may_drop_a_keyword(update: Any, expected: float) -> None:
    def rank(value: float, weight: float) -> float:
        hook = tx.Transform(INNER.init, update)
        grads = torch.tensor(value)
        alone = hook.update(grads, hook.init(grads), weight=weight)[0].item()
        pipeline, start = tx.fuse(hook, tx.sgd(1.0)), {"w": torch.tensor(0.0)}
        if update is _pops:
            after, _ = pipeline.step(start, {"w": grads}, pipeline.init(start), weight=weight)
            assert -after["w"].item() == expected
        return alone

    assert tx.simulate(rank, {"data": 2}, [1.0, 4.0], [1.0, 3.0]) == [expected] * 2


def test_a_parameter_by_place_may_have_the_name_of_a_keyword() -> None:
    hook = tx.chain(tx.mean("data"), tx.Transform(lambda params: (), lambda memory, unit: (memory * 2, unit)))
    assert tx.simulate(lambda g: hook.update(g, hook.init(g))[0].item(), {"data": 2}, [1.0, 4.0]) == [5.0, 5.0]


def test_custom_keywords_reach_the_stage_that_names_them() -> None:
    seen: list[Any] = []

    def update(grads: Any, state: Any, params: Any = None, *, group: Any = None) -> Any:
        seen.append(group)
        return grads, state

    pipeline = tx.fuse(tx.Transform(lambda params: (), update), tx.sgd(1.0))
    params = {"w": torch.tensor(1.0)}
    pipeline.step(params, params, pipeline.init(params), group="decoder")
    assert seen == ["decoder"]
    with pytest.raises(TypeError, match="step takes no 'flush'"):
        pipeline.step(params, params, pipeline.init(params), flush=True)
