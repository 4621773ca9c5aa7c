"""The names of values in a checkpoint: stages by the names of their specs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from fjoin.checkpoint import _values as _names
from fjoin.checkpoint._folder import Folder
from tests.helpers import raises_text

START = {"layer": {"w": torch.linspace(-1, 1, 12).reshape(3, 4)}, "b": torch.zeros(3)}
FEEDBACK = tx.error_feedback(tx.compress(tx.int8(block=4), tx.mean("data")))


def step_of(hook: tx.Transform, after: tx.Transform | None = None) -> fjoin.TrainStep:
    return fjoin.train_step(
        lambda p, x: (p["layer"]["w"] * x).square().sum() + p["b"].sum(), tx.fuse(hook, tx.adam(0.1), after=after)
    )


def names_in(folder: Path) -> set[str]:
    path, manifest = Folder(folder).read(1)
    return {*manifest.leaves, *manifest.numbers}


def saved(folder: Path, step: fjoin.TrainStep) -> fjoin.TrainState:
    state, _ = step(step.init(START), torch.linspace(0.3, 1.7, 12).reshape(3, 4))
    fjoin.save(folder, step, state)
    return state


def test_stages_and_what_is_inside_them(tmp_path: Path) -> None:
    hook = tx.chain(FEEDBACK, tx.skip_if_nonfinite(tx.clip_by_global_norm(1.0)), FEEDBACK)
    saved(tmp_path, step_of(hook, tx.chain(tx.ema(0.5), tx.ema(0.9))))
    assert {name for name in names_in(tmp_path) if name.endswith(".b") or "." not in name[9:]} == {
        "params.b",
        "run.batches",
        "pipeline.step",
        "pipeline.window",
        "pipeline.hook.error_feedback#0.error.b",
        "pipeline.hook.error_feedback#1.error.b",
        "pipeline.after.ema#0.average.b",
        "pipeline.after.ema#1.average.b",
    }


def test_a_stage_more_renames_no_other(tmp_path: Path) -> None:
    state = saved(tmp_path, step_of(FEEDBACK))
    more = step_of(tx.chain(tx.clip_by_value(5.0), FEEDBACK, tx.clip_by_global_norm(9.0)))
    with pytest.warns(UserWarning, match="the checkpoint is of"):
        again = fjoin.load(tmp_path, more, START)
    assert torch.equal(again.pipeline.hook[1].error["b"], state.pipeline.hook.error["b"])
    assert torch.equal(again.params["layer"]["w"], state.params["layer"]["w"])


@pytest.mark.parametrize(
    ("fresh", "anew"),
    [
        (("pipeline.hook",), {"error"}),
        (("pipeline.hook.error_feedback#0.error.*",), {"error"}),
        (("*.error",), set()),
        (("*.exp_avg", "pipeline.hook.error_feedback#0.error"), {"error", "exp_avg"}),
    ],
)
def test_names_that_start_anew(fresh: tuple[str, ...], anew: set[str], tmp_path: Path) -> None:
    def one_rank(rank: int) -> Any:
        state = saved(tmp_path, step_of(FEEDBACK)).clone()
        return state, fjoin.load(tmp_path, step_of(FEEDBACK), START, fresh=fresh)

    if not anew:  # a pattern fits whole names
        raises_text(fjoin.CheckpointError, lambda: tx.simulate(one_rank, {"data": 2}, [0, 1]), "no name")
        return
    for state, again in tx.simulate(one_rank, {"data": 2}, [0, 1]):
        found = {
            "error": (again.pipeline.hook.error["layer.w"], state.pipeline.hook.error["layer.w"]),
            "exp_avg": (again.pipeline.optimizer["layer"]["w"].exp_avg, state.pipeline.optimizer["layer"]["w"].exp_avg),
        }
        for name, (value, before) in found.items():
            assert before.any() and torch.equal(value, torch.zeros_like(value) if name in anew else before)


def test_a_dict_that_grows_after_the_start_does_not_fit(tmp_path: Path) -> None:
    def update(grads: Any, state: Any, params: Any = None) -> Any:
        return grads, {"first": state["first"] or {"b": grads["b"].clone()}}

    keeps = tx.Transform(lambda params: {"first": {}}, update, tx.Needs.LEAVES)
    step = step_of(tx.chain(tx.mean("data"), keeps))
    saved(tmp_path, step)
    raises_text(fjoin.CheckpointError, lambda: fjoin.load(tmp_path, step, START), "first.b")


def test_names_are_computed_once_for_a_form(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []
    placed = _names.placed
    monkeypatch.setattr(_names, "placed", lambda *args: calls.append(args) or placed(*args))
    step = step_of(tx.mean("data"), tx.ema(0.5))
    state = step.init(START)
    runs = fjoin.Checkpoints(tmp_path, step, every=1)
    for _ in range(3):
        state, metrics = step(state, torch.ones(3, 4))
        runs.save(state, metrics)
    assert len(calls) == 1


def test_a_shape_that_changes_between_saves_is_written_as_it_is(tmp_path: Path) -> None:
    """A transform of one's own may keep what has no fixed size."""

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        return grads, {"seen": torch.cat([state["seen"], torch.ones(1)])}

    log = tx.Transform(lambda params: {"seen": torch.zeros(0)}, update, tx.Needs.LEAVES)
    step = step_of(tx.chain(tx.mean("data"), log))
    state, runs = step.init(START), fjoin.Checkpoints(tmp_path, step, every=1)
    for count in range(1, 4):
        state, metrics = step(state, torch.ones(3, 4))
        path = runs.save(state, metrics)
        assert path is not None and fjoin.checkpoint.verify(path) == []
        leaf = Folder(tmp_path).read(count)[1].leaves["pipeline.hook.custom#0.seen"]
        assert leaf.shape == [count]


ADAM = tx.adam(0.01)
ANEW = {
    "masters": (tx.fuse(tx.mean("data"), tx.mixed_precision(ADAM)), "pipeline.optimizer", torch.bfloat16),
    "the anchor of an outer step": (tx.diloco(ADAM, tx.mean("data"), 2), "pipeline.after", torch.float32),
    "exact values of slices": (
        tx.zero(tx.mean("data"), ADAM, "data", gather_codec=tx.int8()),
        "pipeline.gather",
        torch.float32,
    ),
}


@pytest.mark.parametrize("what", ANEW)
def test_what_starts_anew_starts_from_the_parameters_of_the_checkpoint(what: str, tmp_path: Path) -> None:
    pipeline, fresh, dtype = ANEW[what]
    start = {path: p.to(dtype) for path, p in {"w": torch.linspace(-1, 1, 600), "b": torch.zeros(3)}.items()}
    far = {path: p + 5 for path, p in start.items()}  # as after long training

    def one_rank(rank: int) -> float:
        step = fjoin.train_step(lambda p, x: ((p["w"] * x).sum() + p["b"].sum()).float(), pipeline)
        fjoin.save(tmp_path, step, step.init(far))
        again = fjoin.train_step(lambda p, x: ((p["w"] * x).sum() + p["b"].sum()).float(), pipeline)
        state = fjoin.load(tmp_path, again, start, fresh=(fresh,))
        for _ in range(2):
            state, _ = again(state, torch.ones((), dtype=dtype))
        return max(float((state.params[path].float() - far[path].float()).abs().max()) for path in start)

    assert max(tx.simulate(one_rank, {"data": 2}, [0, 1])) < 0.1


def test_parameters_that_start_anew_must_be_given(tmp_path: Path) -> None:
    saved(tmp_path, step_of(FEEDBACK))
    fresh = ("params.b",)
    raises_text(
        fjoin.CheckpointError,
        lambda: fjoin.load(tmp_path, step_of(FEEDBACK), fresh=fresh),
        "'params.b'",
        "pass restore",
    )
    assert not fjoin.load(tmp_path, step_of(FEEDBACK), START, fresh=fresh).params["b"].any()
