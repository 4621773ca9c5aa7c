"""A run goes on with another number of ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text

PAIRS = [(before, after) for before in range(1, 9) for after in range(1, 9)]
INT8 = tx.error_feedback(tx.compress(tx.int8(block=4), tx.mean("data")))
PIPELINES: dict[str, Any] = {
    "plain": lambda: tx.fuse(tx.mean("data"), tx.adamw(0.01)),
    "zero, muon": lambda: tx.zero(tx.mean("data"), tx.partition({"w": tx.muon(0.02), "b": tx.adamw(0.01)}), "data"),
    "zero, masters": lambda: tx.zero(tx.mean("data"), tx.mixed_precision(tx.adamw(0.01)), "data"),
    "zero, int8 gather": lambda: tx.fuse(tx.scatter_mean("data"), tx.adamw(0.01), gather_codec=tx.int8()),
    "momentum, clip, ema": lambda: tx.fuse(
        tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0)), tx.sgd(0.1, momentum=0.9), after=tx.ema(0.9)
    ),
    "skip": lambda: tx.skip_if_nonfinite(tx.fuse(tx.mean("data"), tx.adafactor(0.01))),
    "int8 feedback": lambda: tx.fuse(INT8, tx.sgd(0.1)),
    "local SGD": lambda: tx.local_sgd(tx.adamw(0.01), tx.mean("data"), 3),
    "DiLoCo": lambda: tx.diloco(tx.adamw(0.01), tx.mean("data"), 3),
}
EXACT = [name for name in PIPELINES if name not in ("int8 feedback", "local SGD", "DiLoCo", "zero, int8 gather")]
START = {"w": torch.linspace(-1, 1, 40, dtype=torch.float64).view(8, 5), "b": torch.ones(5, dtype=torch.float64)}
SAMPLES = torch.randn(
    6, 24, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
)  # (step, sample, input)
CUT = 3


def loss_fn(params: Any, x: Tensor) -> Tensor:
    return (x @ params["w"] + params["b"]).square().mean()


def steps(name: str, rank: int, ranks: int, folder: Path, start: int, stop: int) -> Any:
    """Steps on this rank's samples of each global batch; saves at the end. Returns what a run has."""
    step = fjoin.train_step(loss_fn, PIPELINES[name](), weight=len, bucket_bytes=128)
    runs = fjoin.Checkpoints(folder, step)
    state = runs.restore(START)
    assert state.step == start
    restored = tx.to_state_dict(state.clone().pipeline)
    for i in range(start, stop):
        state, _ = step(state, SAMPLES[i][rank::ranks])
    if stop > start:
        runs.save(state)
    last = state.clone()
    step.close()
    return last.params, tx.to_state_dict(last.pipeline), restored


def on(name: str, ranks: int, folder: Path, start: int, stop: int) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return tx.simulate(lambda r: steps(name, r, ranks, folder, start, stop), {"data": ranks}, list(range(ranks)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    known: dict[str, Any] = {}

    def run(name: str) -> Any:
        if name not in known:
            known[name] = on(name, 1, tmp_path_factory.mktemp("whole"), 0, 6)[0][0]
        return known[name]

    return run


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_a_run_on_other_ranks_equals_one_on_the_whole_batch(
    name: str, before: int, after: int, whole: Any, tmp_path: Path
) -> None:
    on(name, before, tmp_path, 0, CUT)
    for params, _, _ in on(name, after, tmp_path, CUT, 6):
        for path, want in whole(name).items():
            assert (params[path] - want).abs().max() < 1e-12 * (START[path] - want).abs().max() + 1e-13


@pytest.mark.sample(6)
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_the_sum_of_residuals_is_kept(before: int, after: int, tmp_path: Path) -> None:
    saved = [state for _, state, _ in on("int8 feedback", before, tmp_path, 0, CUT)]
    loaded = [state for *_, state in on("int8 feedback", after, tmp_path, CUT, CUT)]
    for path in ("w", "b"):
        old, new = (sum(state[f"hook.error.{path}"] for state in states) for states in (saved, loaded))
        assert torch.allclose(old, new, rtol=0, atol=1e-12)
    assert before == 1 or max(float(state["hook.error.w"].abs().max()) for state in saved) > 0


@pytest.mark.parametrize("name", ["local SGD", "DiLoCo"])
@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 5), (4, 1)])
def test_after_an_average_local_sgd_goes_on(name: str, before: int, after: int, tmp_path: Path) -> None:
    saved = on(name, before, tmp_path, 0, 3)
    for params, *_ in on(name, after, tmp_path, 3, 3):
        assert all(torch.equal(params[path], saved[0][0][path]) for path in START)


def test_within_a_window_local_sgd_is_refused(tmp_path: Path) -> None:
    on("local SGD", 3, tmp_path, 0, 2)
    raises_text(fjoin.CheckpointError, lambda: on("local SGD", 2, tmp_path, 2, 3), "params.", "{'data': 3}", "flush")
    assert on("local SGD", 3, tmp_path, 2, 3)[0][0]["w"].shape == (8, 5)


class OwnState(NamedTuple):
    moved: Annotated[tx.PerRank[dict[str, Tensor]], tx.Merge.MEAN]
    left: Annotated[tx.PerRank[dict[str, Tensor]], tx.Merge.SUM]
    own: Annotated[tx.PerRank[dict[str, Tensor]], tx.Merge.RESTART]


@tx.factory
def own_of_each_kind() -> tx.Transform:
    """A mean that keeps each rank's own gradients three times."""
    mean = tx.mean("data")

    def update(grads: Any, state: OwnState, params: Any = None, **extra: Any) -> Any:
        kept = [{path: old + grads[path] for path, old in each.items()} for each in state]
        return mean.update(grads, (), params, **extra)[0], OwnState(*kept)

    def init(params: Any) -> OwnState:
        return OwnState(*({path: torch.zeros_like(p) for path, p in params.items()} for _ in range(3)))

    return tx.Transform(init, update, needs=tx.Needs.PATHS, reduces=tx.Reduction("data", "weight"))


INT4 = tx.compress(tx.int4(block=4), tx.mean("data"))
# What becomes of the values of three ranks on two: a mean, a sum, or the value at the start.
MERGES: dict[str, tuple[Any, dict[str, str]]] = {
    "own": (
        lambda: tx.fuse(own_of_each_kind(), tx.sgd(0.1)),
        {"hook.moved.w": "mean", "hook.left.w": "sum", "hook.own.w": "start"},
    ),
    "local SGD": (PIPELINES["local SGD"], {"optimizer.w.exp_avg": "mean", "optimizer.w.exp_avg_sq": "mean"}),
}


@pytest.mark.parametrize("name", MERGES)
def test_values_of_ranks_are_merged(name: str, tmp_path: Path) -> None:
    make, expected = MERGES[name]

    def one_rank(rank: int, ranks: int, train: bool) -> Any:
        step = fjoin.train_step(loss_fn, make(), weight=len, bucket_bytes=128)
        runs = fjoin.Checkpoints(tmp_path, step)
        state = runs.restore(START)
        for i in range(CUT if train else 0):
            state, _ = step(state, SAMPLES[i][rank::ranks])
        if train:
            runs.save(state)
        last = tx.to_state_dict(state.clone().pipeline)
        step.close()
        return last

    start = tx.simulate(lambda rank: one_rank(rank, 2, False), {"data": 2}, [0, 1])
    saved = tx.simulate(lambda rank: one_rank(rank, 3, True), {"data": 3}, [0, 1, 2])
    found = tx.simulate(lambda rank: one_rank(rank, 2, False), {"data": 2}, [0, 1])
    for path, how in expected.items():
        old, new = [each[path] for each in saved], [each[path] for each in found]
        assert bool(old[0].any()), "else all rules agree"
        if how == "sum":
            assert torch.allclose(sum(old), sum(new), rtol=0, atol=1e-12)  # type: ignore[arg-type]
        else:
            want = start[0][path] if how == "start" else torch.stack(old).mean(0)
            assert all(torch.allclose(each, want, rtol=0, atol=1e-12) for each in new)


def test_parameters_that_are_never_averaged_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(PIPELINES, "one", lambda: tx.fuse(tx.identity(), tx.sgd(0.1)))
    on("one", 3, tmp_path, 0, CUT)
    raises_text(
        fjoin.CheckpointError, lambda: on("one", 2, tmp_path, CUT, CUT), "params.", "values of their own", "flush"
    )


def test_an_open_window_of_accumulate_is_summed(tmp_path: Path) -> None:
    pipeline = tx.fuse(tx.accumulate(3, tx.mean("data")), tx.sgd(0.1))

    def save(rank: int) -> dict[str, Any]:
        params, state = START, pipeline.init(START)
        for i in range(2):
            x = SAMPLES[i][rank::3][rank:]  # 8, 7, 6 samples
            params, state = pipeline.step(params, torch.func.grad(loss_fn)(params, x), state, weight=len(x))
        fjoin.save(tmp_path, pipeline, (params, state), mesh=fjoin.mesh({"data": 3}))
        return tx.to_state_dict(state)

    def load(rank: int) -> dict[str, Any]:
        return tx.to_state_dict(fjoin.load(tmp_path, pipeline, mesh=fjoin.mesh({"data": 2}))[1])

    saved, loaded = tx.simulate(save, {"data": 3}, [0, 1, 2]), tx.simulate(load, {"data": 2}, [0, 1])
    assert sum(float(each["window"]) for each in saved) == 42
    for name in ("window", "hook.weight", "hook.grads.w", "hook.grads.b"):
        old, new = (sum(each[name] for each in states) for states in (saved, loaded))
        assert torch.allclose(old, new, rtol=0, atol=1e-12), name  # type: ignore[arg-type]
