"""The step is the pure pipeline, on the host and by the device's verdict: counters, phases and master copies included."""

from __future__ import annotations

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, raises_text
from tests.training.plan_problem import NAN, PIPELINES, SGD, UNEVEN, axes_for, by_step, purely, start


@pytest.mark.sample(12)
@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize(
    "inputs",
    [
        "uneven",
        "a step without input",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("even", "a node without input")),
    ],
)
@pytest.mark.parametrize("name", PIPELINES)
def test_the_step_is_the_pure_pipeline(name: str, inputs: str, skips: bool) -> None:
    """On the host and by the device's verdict; with `skips` one rank has a NaN in the second step."""
    pipeline, batches = PIPELINES[name], [list(each) for each in UNEVEN[inputs]]
    if skips:
        pipeline, batches[0][1] = tx.skip_if_nonfinite(pipeline), NAN
    axes = axes_for(pipeline)
    want = tx.simulate(lambda own: purely(pipeline, own), axes, batches)
    encoded = name in ("in fewer bits", "encoded")  # whose blocks are those of buckets in the step
    for on_device in (False, True):
        got = tx.simulate(lambda own: by_step(pipeline, axes, own, on_device), axes, batches)  # noqa: B023
        for (params, state), (params_of_pure, pure) in zip(got, want, strict=True):
            for mine, other in zip(params, params_of_pure, strict=True):
                assert max_diff(mine, other) <= (0.05 if encoded else 1e-12)
            held, other = (state.inner, pure.inner) if skips else (state, pure)
            assert held.step == other.step == 4
            assert max_diff((held.after, held.on_state), (other.after, other.on_state)) <= 1e-12
            assert not skips or state.skipped == pure.skipped


def test_one_counter_decides_on_all_periods() -> None:
    """Those in a state that has lost its place, such as a hook's that was started anew, follow the pipeline's."""
    hook = tx.switch_after(3, tx.mean("data"), tx.identity())
    pipeline = tx.fuse(hook, SGD, after=tx.every(2, tx.stateless(lambda p: p + 1)))
    params = start()
    with fjoin.bind(fjoin.mesh({"data": -1})):
        state = pipeline.init(params)
        for _ in range(3):
            params, state = pipeline.step(params, params, state)
        fresh = pipeline.init(params)
        state = state._replace(hook=fresh.hook, after=fresh.after)
        moved, after = pipeline.step(params, start(), state)
    assert state.step == 3 and after.hook.step == after.after.step == after.step == 4
    assert max_diff(moved["v"], params["v"] + 1) == 0


def test_every_in_every_counts_runs() -> None:
    pipeline = tx.fuse(tx.identity(), SGD, after=tx.every(2, tx.every(3, tx.stateless(lambda p: p + 1))))
    seen, _ = purely(pipeline, [None] * 12)
    assert [int(params["w"][0]) for params in seen] == [1] * 5 + [2] * 6 + [3]


def test_average_uses_the_master_copies() -> None:
    """The next step continues from the average, and small steps in between add up."""
    pipeline = tx.fuse(tx.identity(), tx.mixed_precision(tx.sgd(0.25)), after=tx.every(2, tx.mean("data")))

    def want(batches: list[float], others: list[float]) -> list[float]:
        own, other, seen = torch.tensor(1.0), torch.tensor(1.0), []
        for i, (a, b) in enumerate(zip(batches, others, strict=True)):
            own, other = own - 0.25 * a, other - 0.25 * b
            if i % 2:
                first, second = sum(batches[i - 1 : i + 1]), sum(others[i - 1 : i + 1])
                own = other = (first * own + second * other) / (first + second)
            seen.append(own.to(torch.bfloat16).item())
        return seen

    batches = [[1.0, 1.0, 0.01, 0.01, 0.01], [3.0, 1.0, 0.02, 0.01, 0.01]]
    wanted = [want(*batches), want(*batches[::-1])]
    for run in (
        lambda own: purely(pipeline, own, torch.bfloat16),
        lambda own: by_step(pipeline, {"data": 2}, own, False, torch.bfloat16),
        lambda own: by_step(pipeline, {"data": 2}, own, True, torch.bfloat16),
    ):
        out = tx.simulate(run, {"data": 2}, batches)
        for (seen, state), values in zip(out, wanted, strict=True):
            assert [params["w"][0].item() for params in seen] == pytest.approx(values, abs=0.01)
            assert seen[-1]["w"][0] == state.optimizer["w"].master[0].to(torch.bfloat16)
        masters = [state.optimizer["w"].master[0].item() for _, state in out]
        assert masters[0] == pytest.approx(masters[1], abs=0.01)


def test_a_reserved_name_in_the_lane() -> None:
    pipeline, params = tx.fuse(tx.identity(), SGD), start()
    raises_text(ValueError, lambda: pipeline.step(params, params, pipeline.init(params), lane={"weight": 1.0}), "taken")
