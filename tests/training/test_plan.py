"""One plan for the pure pipeline and for the step: which ranks agree, on which values, when, and over which axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers import max_diff, raises_text
from torch import Tensor
from traffic import watched

import fjoin
from fjoin import transforms as tx

NAN = math.nan
SGD, MOMENTUM = tx.sgd(0.5), tx.sgd(0.5, momentum=0.9, weight_decay=0.1)
NODES = {"node": 2, "local": 2}


def product(params: Any, batch: Any) -> Tensor:
    return (params["w"] * batch).sum() + 2 * (params["v"] * batch).sum()


def start(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {"w": torch.ones(2, dtype=dtype), "v": torch.zeros(3, dtype=dtype)}


def weight_of(batch: Any) -> float:
    return 0.0 if batch is None else 1.0 if math.isnan(batch) else abs(batch)


def purely(pipeline: tx.Pipeline, batches: Sequence[Any], dtype: torch.dtype = torch.float64) -> Any:
    """The parameters after each step of the pure pipeline; a batch of None is none. The last: its state."""
    params: Any = start(dtype)
    state, seen = pipeline.init(params), []
    for batch in batches:
        value = 0.0 if batch is None else batch
        grads = {"w": torch.full_like(params["w"], value), "v": torch.full_like(params["v"], 2 * value)}
        params, state = pipeline.step(params, grads, state, weight=weight_of(batch))
        seen.append(params)
    return seen, state


def by_step(
    pipeline: tx.Pipeline, axes: dict[str, int], batches: Sequence[Any], on_device: bool, dtype: torch.dtype = torch.float64
) -> Any:  # fmt: skip
    step = fjoin.train_step(product, pipeline, mesh=fjoin.mesh(axes), weight=weight_of)
    step._run.step_check.on_device = on_device
    state, seen = step.init(start(dtype)), []
    for batch in batches:
        state, _ = step(state, batch)
        seen.append({path: p.clone() for path, p in state.params.items()})
    return seen, state.clone().pipeline


def summed_by_hand(grad: Tensor) -> Tensor:
    return tx.psum(grad, "data") / 4


EVERY = tx.every(2, tx.mean("data"))
PIPELINES = {
    "mean": tx.fuse(tx.mean("data"), MOMENTUM),
    "mean, then an average": tx.fuse(tx.mean("data"), MOMENTUM, after=EVERY),
    "local steps": tx.fuse(tx.noop(), MOMENTUM, after=EVERY),
    "local steps of nodes": tx.fuse(tx.mean("local"), MOMENTUM, after=tx.every(2, tx.mean("node"))),
    "two periods": tx.fuse(
        tx.mean("local"), MOMENTUM, after=tx.chain(tx.every(2, tx.mean("local")), tx.every(3, tx.mean(("node", "local"))))
    ),
    "live": tx.fuse(tx.mean("data", over="live"), MOMENTUM, after=tx.every(2, tx.mean("data", over="live"))),
    "world": tx.fuse(tx.mean("data", over="world"), MOMENTUM, after=EVERY),
    "now and then": tx.fuse(EVERY, MOMENTUM),
    "first means, then local steps": tx.fuse(tx.switch_after(3, tx.mean("data"), tx.noop()), MOMENTUM, after=EVERY),
    "two stages": tx.fuse(tx.chain(tx.mean("data"), tx.clip_by_global_norm(1.0)), MOMENTUM, after=EVERY),
    "one leaf": tx.fuse(tx.masked(tx.mean("data"), "w"), MOMENTUM),
    "by hand": tx.fuse(tx.stateless(summed_by_hand), MOMENTUM),
    "in fewer bits": tx.fuse(tx.cast(torch.bfloat16, tx.mean("data")), SGD, after=EVERY),
    "encoded": tx.fuse(tx.error_feedback(tx.quantized_mean("data", tx.int8())), SGD, after=EVERY),
}  # fmt: skip
UNEVEN = {
    "even": [[1.0, 2.0, 1.0, 3.0], [2.0, 1.0, 4.0, 1.0], [1.0, 1.0, 2.0, 2.0], [3.0, 1.0, 1.0, 1.0]],
    "uneven": [[1.0, 2.0, 1.0, 3.0], [2.0, None, None, None], [1.0, 1.0, None, None], [None] * 4],
    "a node without input": [[1.0, 2.0, 1.0, 3.0], [2.0, 1.0, 2.0, None], [None] * 4, [1.0, None, None, None]],
    "a step without input": [[1.0, None, 1.0, None], [2.0, None, 1.0, None], [1.0, None, None, None], [None] * 4],
}


def axes_for(pipeline: tx.Pipeline) -> dict[str, int]:
    return NODES if "'local'" in repr(pipeline) else {"data": 4}


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
            assert held.step == other.step == 4 and held.after == other.after
            assert not skips or state.skipped == pure.skipped


# -- the axes over which ranks loop together ---------------------------------------------------------


def looped(pipeline: tx.Pipeline, batches: list[float], **options: Any) -> Any:
    step = fjoin.train_step(lambda p, b: p["w"] * b, pipeline, mesh=fjoin.mesh(NODES), **options)
    state, calls = step.init({"w": torch.tensor(0.0)}), 0
    for batch in step.join(batches):
        state, metrics = step(state, batch)
        calls += 1
    return calls, float(state.params["w"]), metrics.weight


def test_loops_end_over_the_axes_of_the_parameter_transform_too() -> None:
    """Nodes with different numbers of batches end together, and their average is weighted by the batches trained on."""
    pipeline = tx.fuse(tx.mean("local"), tx.sgd(1.0), after=tx.mean("node"))
    out = tx.simulate(lambda b: looped(pipeline, b), NODES, [[1.0], [3.0], [2.0, 4.0], [2.0]])
    assert out == [(2, -6.0, 1.0)] * 4  # (-2 * 2 + -2 * 2) / 4, then the second node's -2 - 4 alone


def test_loops_end_over_the_axes_of_the_buffers_too() -> None:
    def one(batches: list[float]) -> Any:
        step = fjoin.train_step(
            lambda p, buffers, b: (p["w"] * b, None, {"v": buffers["v"] + b}), tx.fuse(tx.mean("local"), tx.sgd(1.0)),
            mesh=fjoin.mesh(NODES), on_buffers=tx.average_buffers(("node", "local")),
        )  # fmt: skip
        state, calls = step.init({"w": torch.tensor(0.0)}, {"v": torch.tensor(0.0)}), 0
        for batch in step.join(batches):
            state, _ = step(state, batch)
            calls += 1
        assert state.buffers is not None
        return calls, float(state.params["w"]), float(state.buffers["v"])

    out = tx.simulate(one, NODES, [[1.0], [3.0], [2.0, 4.0], [2.0]])
    # The buffers: the mean of 1, 3, 2, 2, then of the one rank that has input. The first node takes one step only.
    assert out == [(2, -2.0, 6.0)] * 2 + [(2, -6.0, 6.0)] * 2


def test_explain_has_the_buffers_and_the_message_of_those_that_loop_together(pool: Any) -> None:
    """Over the union of the axes: counted at torch.distributed."""
    pipeline, over = tx.fuse(tx.mean("local"), SGD, after=tx.mean("node")), tx.average_buffers(("node", "local"))
    buffers = {"n": torch.zeros(3), "count": torch.tensor(1)}
    what = tx.explain(pipeline, start(), NODES, buffers=buffers, on_buffers=over)
    assert [row.stage for row in what.rows if row.messages] == [
        "mean('local')", "(the step's own counts)", "mean('node')", "average_buffers(('node', 'local'))"
    ]  # fmt: skip
    announced = sorted(m.payload_bytes for row in what.rows for m in row.messages)
    assert [sorted(sent) for sent in pool.run(4, sent_with_buffers, NODES)] == [announced] * 4
    raises_text(ValueError, lambda: tx.explain(pipeline, start(), NODES, on_buffers=over), "without buffers")


def sent_with_buffers(axes: dict[str, int]) -> list[int]:
    """The bytes of the messages of a step."""
    step = fjoin.train_step(
        lambda p, buffers, b: (product(p, b), None, {**buffers, "n": buffers["n"] + b}),
        tx.fuse(tx.mean("local"), SGD, after=tx.mean("node")), mesh=fjoin.mesh(axes), on_buffers=tx.average_buffers(("node", "local")),
    )  # fmt: skip
    state = step.init(start(), {"n": torch.zeros(3), "count": torch.tensor(1)})
    state, _ = step(state, 1.0)
    with watched() as sent:
        step(state, 2.0)
    return [one.bytes for one in sent]


# -- weights -------------------------------------------------------------------------------------------


def test_an_average_of_parameters_counts_its_window() -> None:
    """A rank that is out of input in the last step of a window has trained in it all the same."""
    pipeline = tx.fuse(tx.noop(), tx.sgd(1.0), after=tx.every(2, tx.mean("data")))

    def one(batches: list[float]) -> float:
        step = fjoin.train_step(lambda p, b: p["w"] * b, pipeline)
        state = step.init({"w": torch.tensor(0.0, dtype=torch.float64)})
        for batch in step.join(batches):
            state, _ = step(state, batch)
        return float(state.params["w"])

    assert tx.simulate(one, {"data": 2}, [[1.0, 1.0], [10.0]]) == [(2 * -2.0 + 1 * -10.0) / 3] * 2


def test_a_rank_without_input_takes_no_step_of_its_own() -> None:
    """Where nothing is reduced its momentum does not move it."""
    pipeline = tx.fuse(tx.noop(), tx.sgd(1.0, momentum=0.9))

    def one(batches: list[float]) -> list[float]:
        step = fjoin.train_step(lambda p, b: p["w"] * b, pipeline)
        state, seen = step.init({"w": torch.tensor(0.0)}), []
        for batch in step.join(batches):
            state, _ = step(state, batch)
            seen.append(round(float(state.params["w"]), 3))
        return seen

    assert tx.simulate(one, {"data": 2}, [[1.0, 1.0, 1.0], [1.0]]) == [[-1.0, -2.9, -5.61], [-1.0, -1.0, -1.0]]


def test_ranks_of_a_node_stay_equal_whatever_their_weights() -> None:
    """`after` is given the weight of the node, not of the rank: local weights (1, 0) and (1, 1)."""
    pipeline = tx.fuse(tx.mean("local"), SGD, after=tx.mean("node"))
    for batches in ([[1.0], [None], [2.0], [4.0]],):
        out = tx.simulate(lambda own: purely(pipeline, own)[0][-1]["w"][0].item(), NODES, batches)
        first, second = 1 - 0.5 * 1, 1 - 0.5 * (2 * 2 + 4 * 4) / 6
        assert max(abs(w - (1 * first + 6 * second) / 7) for w in out) < 1e-12


@pytest.mark.parametrize("over", ["weight", "live", "world"])
def test_an_average_behind_a_window_counts_all_its_calls(over: Any) -> None:
    """1 + 2 + 5 of one rank against 4 of another, and not the last call's 5 against 4."""
    hooks = {"reduces": tx.accumulate(3, tx.mean("local", over)), "does not": tx.accumulate(3, tx.noop())}
    for hook in hooks.values():
        pipeline = tx.fuse(hook, SGD, after=tx.mean("node"))
        out = tx.simulate(
            lambda own: purely(pipeline, own)[0][-1]["w"][0].item(),  # noqa: B023
            {"node": 2, "local": 1}, [[1.0, 2.0, 5.0], [2.0, 1.0, 1.0]],
        )  # fmt: skip
        first, second = 1 - 0.5 * (1 + 4 + 25) / 8, 1 - 0.5 * (4 + 1 + 1) / 4
        assert max(abs(w - (8 * first + 4 * second) / 12) for w in out) < 1e-12


def test_a_window_without_weight_changes_nothing() -> None:
    pipeline = tx.fuse(tx.noop(), MOMENTUM, after=tx.every(2, tx.mean("data")))
    out = tx.simulate(
        lambda own: purely(pipeline, own)[0][-1]["w"][0].item(), {"data": 2}, [[None, None], [None, None]]
    )
    assert out == [1.0, 1.0]


def test_the_lane_is_summed_once() -> None:
    """Also where two stages reduce over one axis."""
    hook = tx.chain(tx.clip_by_value(1e9), tx.mean("data"), tx.mean("data"))

    def one(batch: float) -> Any:
        step = fjoin.train_step(product, tx.fuse(hook, SGD), weight=weight_of)
        state, metrics = step(step.init(start()), batch)
        return metrics.weight, state.params["w"][0].item()

    assert tx.simulate(one, {"data": 3}, [1.0, 2.0, 3.0]) == [(6.0, 1 - 0.5 * (1 + 4 + 9) / 6)] * 3


# -- counters -------------------------------------------------------------------------------------------


def test_one_counter_decides_on_all_periods() -> None:
    """Those in a state that has lost its place, such as a hook's that was started anew, follow the pipeline's."""
    hook = tx.switch_after(3, tx.mean("data"), tx.noop())
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
    pipeline = tx.fuse(tx.noop(), SGD, after=tx.every(2, tx.every(3, tx.stateless(lambda p: p + 1))))
    seen, _ = purely(pipeline, [None] * 12)
    assert [int(params["w"][0]) for params in seen] == [1] * 5 + [2] * 6 + [3]


def test_an_axis_of_one_rank_needs_no_message() -> None:
    pipeline = tx.fuse(tx.mean("local"), SGD, after=tx.every(2, tx.mean("node")))
    sent = [row.stage for row in tx.explain(pipeline, start(), {"node": 1, "local": 2}).rows if row.messages]
    assert "(the step's own counts)" not in sent
    alone = tx.fuse(tx.mean("node"), SGD, after=tx.every(2, tx.mean("local")))
    for other in (pipeline, alone):
        axes, batches = {"node": 1, "local": 2}, UNEVEN["uneven"][:2]
        want = tx.simulate(lambda own: purely(other, own)[0], axes, batches)  # noqa: B023
        got = tx.simulate(lambda own: by_step(other, axes, own, False)[0], axes, batches)  # noqa: B023
        assert max_diff(got, want) < 1e-12


# -- verdicts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_device", [False, True])
def test_a_rank_whose_gradients_stay_its_own_leaves_out_its_own_steps(on_device: bool) -> None:
    """The others take them; the average that is due is taken without the work of that step."""
    pipeline = tx.skip_if_nonfinite(tx.fuse(tx.noop(), SGD, after=tx.mean("data")))
    batches = [[NAN], [1.0], [3.0]]
    want = tx.simulate(lambda own: purely(pipeline, own)[0][0]["w"][0].item(), {"data": 3}, batches)
    average = (1 * 0.5 + 3 * -0.5) / 4
    assert want == [average] * 3
    assert tx.simulate(
        lambda own: by_step(pipeline, {"data": 3}, own, on_device)[0][0]["w"][0].item(), {"data": 3}, batches
    ) == want  # fmt: skip
    skipped = tx.simulate(
        lambda own: by_step(pipeline, {"data": 3}, own, on_device)[1].skipped.item(), {"data": 3}, batches
    )
    assert skipped == [1, 0, 0]


def not_finite(hook: tx.Transform, on_device: bool, batches: list[float], as_loop: bool) -> Any:
    """The step of the NonFinite, its text, and the state after it."""
    pipeline = tx.fuse(hook, SGD, after=tx.every(4, tx.mean("data" if "node" not in repr(hook) else "node")))
    step = fjoin.train_step(product, pipeline, mesh=fjoin.mesh({"data": -1}))
    step._run.step_check.on_device = on_device
    state, calls = step.init(start()), 0
    try:
        for batch in step.join(batches) if as_loop else batches:
            calls += 1
            state, _ = step(state, batch)
    except fjoin.NonFinite as error:
        ended = state.step, state.params["w"][0].item()
        state, _ = step(state, 1.0)  # the step can be used again
        return calls, error.step, error.ranks, ended, state.params["w"][0].item(), str(error)
    return calls, None, (), (), 0.0, ""


def test_ranks_that_take_their_own_steps_raise_together() -> None:
    """In the call after the step that one of them has left out; the others took it, and the text says so."""
    out = tx.simulate(
        lambda b: not_finite(tx.noop(), False, b, True), {"data": 3}, [[1.0, 1.0, 1.0], [1.0, NAN, 1.0], [1.0] * 3]
    )
    for rank, (calls, step, ranks, ended, after, text) in enumerate(out):
        assert (calls, step, ranks) == (3, 1, (1,)) and "Rank 1 left step 1 out, which the others took" in text
        assert ended == (2, 0.5 if rank == 1 else 0.0) and after == ended[1] - 0.5


def test_a_last_step_that_some_ranks_left_out_is_raised_at_the_end_of_the_loop() -> None:
    for on_device in (False, True):
        out = tx.simulate(lambda b: not_finite(tx.noop(), on_device, b, True), {"data": 2}, [[1.0, 1.0], [1.0, NAN]])  # noqa: B023
        assert [(calls, step, ranks) for calls, step, ranks, *_ in out] == [(2, 1, (1,))] * 2


def test_by_the_devices_verdict_they_raise_together_too() -> None:
    out = tx.simulate(
        lambda b: not_finite(tx.noop(), True, b, False), {"data": 2}, [[1.0, NAN, 1.0, 1.0, 1.0], [1.0] * 5]
    )
    assert [(calls, step, ranks) for calls, step, ranks, *_ in out] == [out[0][:3]] * 2 == [(5, 1, (0,))] * 2


def test_a_loss_scale_is_a_ranks_own_where_nothing_is_reduced() -> None:
    pipeline = tx.dynamic_loss_scale(tx.fuse(tx.noop(), SGD), init_scale=4.0)
    for on_device in (False, True):
        out = tx.simulate(
            lambda own: float(by_step(pipeline, {"data": 2}, own, on_device, torch.float32)[1].scale),  # noqa: B023
            {"data": 2}, [[NAN], [1.0]],
        )  # fmt: skip
        assert out == [2.0, 4.0]


# -- phases ---------------------------------------------------------------------------------------------


def test_ranks_loop_together_in_all_phases() -> None:
    """First global means, then those of nodes only: loops end over all ranks in both."""
    hook = tx.switch_after(2, tx.mean(("node", "local")), tx.mean("local"))
    pipeline = tx.fuse(hook, tx.sgd(1.0), after=tx.every(3, tx.mean("node")))
    batches = [[1.0] * 3, [1.0] * 3, [1.0] * 5, [1.0] * 4]
    out = tx.simulate(lambda b: looped(pipeline, b), NODES, batches)
    assert [calls for calls, *_ in out] == [5] * 4
    assert {w for _, w, _ in out[:2]} == {-3.0} and {w for _, w, _ in out[2:]} == {-5.0}


# -- master copies ----------------------------------------------------------------------------------------


def test_an_average_is_that_of_the_master_copies() -> None:
    """The next step continues from the average, and small steps in between add up."""
    pipeline = tx.fuse(tx.noop(), tx.mixed_precision(tx.sgd(0.25)), after=tx.every(2, tx.mean("data")))

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
    pipeline, params = tx.fuse(tx.noop(), SGD), start()
    raises_text(ValueError, lambda: pipeline.step(params, params, pipeline.init(params), lane={"weight": 1.0}), "taken")


# -- in a DistributedDataParallel --------------------------------------------------------------------------

REGISTERED = (
    "mean, then an average",
    "local steps",
    "world",
    "first means, then local steps",
    "two stages",
    "one leaf",
    "by hand",
)


class Holder(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w, self.v = (torch.nn.Parameter(p) for p in start(dtype).values())

    def forward(self, batch: float) -> Tensor:
        return product({"w": self.w, "v": self.v}, batch)


def in_module(name: str, batches: list[list[Any]], skips: bool, dtype: torch.dtype = torch.float64) -> Any:
    """The parameters after each backward pass; a batch of None counts nothing."""
    pipeline = tx.skip_if_nonfinite(PIPELINES[name]) if skips else PIPELINES[name]
    model = torch.nn.parallel.DistributedDataParallel(Holder(dtype))
    handle, seen = fjoin.ddp.register(model, pipeline), []
    for batch in batches[torch.distributed.get_rank()]:
        handle.weight(weight_of(batch))
        model.zero_grad()
        try:
            model(0.0 if batch is None else batch).backward()
        except fjoin.NonFinite as error:
            return seen, (error.step, error.ranks)
        seen.append({path: p.detach().clone() for path, p in model.module.named_parameters()})
    return seen, handle.step


@pytest.mark.parametrize("name", REGISTERED)
def test_a_registered_pipeline_is_the_pure_one(pool: Any, name: str) -> None:
    for skips in (False, True):
        pipeline, batches = PIPELINES[name], [list(each) for each in UNEVEN["uneven"][:3]]
        if skips:
            pipeline, batches[0][1] = tx.skip_if_nonfinite(pipeline), NAN
        batches = [own + [None] * (4 - len(own)) for own in batches]
        if name == "by hand":  # which sums over four
            batches.append([None] * 4)
        want = tx.simulate(lambda own: purely(pipeline, own)[0], {"data": len(batches)}, batches)  # noqa: B023
        for (seen, steps), wanted in zip(pool.run(len(batches), in_module, name, batches, skips), want, strict=True):
            assert steps == 4 and max_diff(seen, wanted) < 1e-12


def test_modules_that_take_their_own_steps_raise_together(pool: Any) -> None:
    for rank, (seen, error) in enumerate(
        pool.run(2, in_module, "local steps", [[1.0] * 4, [1.0, NAN, 1.0, 1.0]], False)
    ):
        assert len(seen) == 2 and error == (1, (1,)), rank


def load_another_step() -> Any:
    model = torch.nn.parallel.DistributedDataParallel(Holder(torch.float64))
    handle, rank = fjoin.ddp.register(model, PIPELINES["mean"]), torch.distributed.get_rank()
    saved = handle.state_dict()
    handle.load_state_dict({**saved, "step": 4 if rank == 1 else 3})
    text = raises_text(fjoin.DesyncError, lambda: model(1.0).backward(), "rank 1 goes on from step 4", "step 3")
    return bool(text)


def test_ranks_that_load_different_steps_are_told_apart(pool: Any) -> None:
    assert pool.run(3, load_another_step) == [True] * 3
