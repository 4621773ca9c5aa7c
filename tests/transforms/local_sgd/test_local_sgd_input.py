"""Edge cases and errors of local SGD."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, raises_text

SGD, MOMENTUM = tx.sgd(0.1), tx.sgd(0.1, momentum=0.9)
MEAN = tx.mean("data")


@pytest.mark.parametrize(
    "make, texts",
    [
        (lambda: tx.local_sgd(SGD, tx.mean("data"), 0), ("every", "got 0")),
        (lambda: tx.local_sgd(SGD, tx.mean("data"), 2, state="forget"), ("'keep' or 'average'", "'forget'")),
        (lambda: tx.post_local_sgd(SGD, tx.mean("data"), 2, -1), ("warmup_steps", "got -1")),
        (lambda: tx.local_sgd(SGD, tx.chain(MEAN, tx.mean("a")), 2, state="average"), ("one mean", "chain(")),
        (lambda: tx.diloco(SGD, tx.mean("data"), 4, delay=4), ("delay must be below every=4", "got 4")),
        (lambda: tx.diloco(SGD, tx.mean("data"), 4, mix=1.0), ("mix", "got 1.0")),
        (lambda: tx.diloco(SGD, tx.mean("data"), 4, fragments=5), ("5 fragments", "every=4")),
        (lambda: tx.diloco(SGD, tx.mean("data"), 4, fragments=0), ("fragments", "got 0")),
        (lambda: tx.diloco(SGD, tx.mean("data"), 4, mix="a"), ("mix", "got 'a'")),
        (lambda: tx.diloco(SGD, tx.mean("data"), 4, fragments=[]), ("fragments", "got 0")),
        (lambda: tx.diloco(SGD, tx.mean("data"), 4, fragments=["*", "b", "*"]), ("['*'] more than once",)),
        (lambda: tx.ema(1.0), ("decay", "got 1.0")),
        (lambda: tx.every(4, MEAN, first=-1), ("first", "got -1")),
        (lambda: tx.every(4, MEAN, except_every=0), ("except_every", "got 0")),
    ],
)
def test_values_out_of_range(make: Any, texts: tuple[str, ...]) -> None:
    raises_text(ValueError, make, *texts)


@pytest.mark.parametrize(
    "make, texts",
    [
        (lambda: tx.outer_step(tx.identity(), SGD), ("identity()", "no reduction")),
        (lambda: tx.outer_step(tx.masked(MEAN, "w"), SGD), ("no reduction",)),
        (lambda: tx.outer_step(MEAN, MEAN), ("Optimizer", "mean('data')")),
        (lambda: tx.local_sgd(MEAN, tx.mean("data"), 2), ("Optimizer",)),
        (lambda: tx.local_sgd(SGD, "data", 2), ("local_sgd: reduction", "'data'")),
        (lambda: tx.local_sgd(SGD, tx.mean(3), 2), ("axis",)),
        (lambda: tx.diloco(SGD, tx.mean("data"), 4, fragments="wa"), ("list of glob patterns", "'wa'", "['wa']")),
        (lambda: tx.diloco(SGD, tx.mean("data"), 4, fragments=1.5), ("fragments", "got 1.5")),
        (lambda: tx.diloco(SGD, tx.mean("data"), 4, fragments=None), ("fragments", "got None")),
        (lambda: tx.diloco(SGD, tx.mean("data"), 4, fragments=["a", 3]), ("a fragment", "got 3")),
        (lambda: tx.diloco(SGD, tx.identity(), 4), ("identity()", "no reduction")),
        (lambda: tx.fuse(MEAN, SGD, on_state=SGD), ("on_state", "sgd")),
    ],
)
def test_arguments_of_the_wrong_kind(make: Any, texts: tuple[str, ...]) -> None:
    raises_text((TypeError, ValueError), make, *texts)


def test_more_fragments_than_parameters() -> None:
    pipeline = tx.diloco(SGD, tx.mean("data"), 9, fragments=3)
    raises_text(
        ValueError,
        lambda: pipeline.init({"a": torch.zeros(9), "b": torch.zeros(1)}),
        "3 fragments",
        "got 2",
        "'a', 'b'",
    )


def test_patterns_of_fragments_match_all_parameters() -> None:
    pipeline = tx.diloco(SGD, tx.mean("data"), 9, fragments=("a*", "b*"))
    raises_text(ValueError, lambda: pipeline.init({"a": torch.zeros(9), "b": torch.zeros(1), "c": torch.zeros(1)}), "'c'")  # fmt: skip
    raises_text(ValueError, lambda: pipeline.init({"a": torch.zeros(9)}), "match no path", "b*")


def test_wires_over_more_axes_and_patterns_in_lists() -> None:
    wire = tx.error_feedback(tx.compress(tx.int8(), tx.mean(("a", "b"))))
    assert "('a', 'b')" in repr(tx.post_local_sgd(SGD, wire, 4, 2, hook=tx.mean(("a", "b")), local=tx.mean("b")).after)
    grouped = tx.diloco(SGD, tx.mean("data"), 4, fragments=[["a", "b"], "*"])
    assert grouped == tx.diloco(SGD, tx.mean("data"), 4, fragments=(("a", "b"), "*"))


def test_old_arguments_and_half_of_the_reductions() -> None:
    raises_text(TypeError, lambda: tx.local_sgd(SGD, "data", 4, state="average"), "reduction", "mean('data')")
    half = {"local": tx.mean("b")}
    raises_text(ValueError, lambda: tx.post_local_sgd(SGD, tx.mean("a"), 4, 2, **half), "local=", "hook=")


PIPELINES = {
    "local": tx.local_sgd(MOMENTUM, tx.mean("data"), 1),
    "outer": tx.diloco(MOMENTUM, tx.mean("data"), 1),
    "chain": tx.fuse(tx.identity(), MOMENTUM, after=tx.chain(tx.every(1, tx.average_parameters("data"), first=0), tx.ema(0.5))),
    "parts": tx.fuse(tx.identity(), MOMENTUM, after=tx.partition({"w": tx.every(1, tx.average_parameters("data"), first=0)})),
    "state": tx.local_sgd(MOMENTUM, tx.mean("data"), 1, state="average"),
    "average": tx.fuse(tx.identity(), MOMENTUM, after=tx.average_parameters("data")),
    "switch": tx.post_local_sgd(MOMENTUM, tx.mean("data"), 1, 0),
    "skips": tx.skip_if_nonfinite(tx.local_sgd(MOMENTUM, tx.mean("data"), 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", PIPELINES)
def test_states_and_parameters_that_do_not_fit(name: str) -> None:
    """`step` and `flush` raise the same errors."""
    pipeline, p = PIPELINES[name], {"w": torch.zeros(2)}
    state = pipeline.init(p)
    with fjoin.bind(fjoin.mesh({"data": 1})):
        for given in (3, None, (), p):
            raises_text(ValueError, lambda: pipeline.step(p, p, given), "state is a", "init or step returned")  # noqa: B023
            raises_text(ValueError, lambda: pipeline.flush(p, given), "state is a", "init or step returned")  # noqa: B023
        other: Any
        for other in {"x": torch.zeros(2)}, [torch.zeros(2)]:
            raises_text(ValueError, lambda: pipeline.step(other, other, state), "state does not fit params")  # noqa: B023
            raises_text(ValueError, lambda: pipeline.flush(other, state), "state does not fit params")  # noqa: B023
        raises_text(ValueError, lambda: pipeline.flush({"w": torch.zeros(3)}, state), "state['w'].momentum", "(3,)")
        raises_text(TypeError, lambda: pipeline.flush(3, state), "expected a tensor")
        if name != "skips":
            foreign = state._replace(optimizer=tx.adam().init(p))
            raises_text(ValueError, lambda: pipeline.flush(p, foreign), "state['w'] is a AdamState")


def test_states_of_other_pipelines() -> None:
    """They raise by name, or are accepted if their form is the same."""
    p, taken = {"w": torch.zeros(2)}, set()
    with fjoin.bind(fjoin.mesh({"data": 1})):
        for name, pipeline in PIPELINES.items():
            for other in PIPELINES.keys() - {name}:
                for use in functools.partial(pipeline.step, p, p), functools.partial(pipeline.flush, p):
                    try:
                        use(PIPELINES[other].init(p))
                        taken.add((name, other))
                    except ValueError as error:
                        assert "state" in str(error), error
    assert not taken & {
        (a, b) for a in ("local", "outer", "chain", "switch") for b in ("local", "outer", "chain", "switch")
    }


def test_an_axis_that_is_not_there() -> None:
    pipeline = tx.local_sgd(SGD, tx.mean("pod"), 1)
    p = {"w": torch.ones(2)}
    raises_text(tx.UnboundAxis, lambda: pipeline.step(p, p, pipeline.init(p)), "pod")


def test_states_without_a_mean() -> None:
    """Named at init, before any step."""
    p = {"w": torch.ones(2)}
    for opt, name in (tx.nadam(), "mu_product"), (tx.asgd(), "eta"):
        raises_text(
            TypeError, lambda opt=opt: tx.local_sgd(opt, tx.mean("data"), 2, state="average").init(p), name, "'w'"
        )


@pytest.mark.parametrize(
    "pipeline",
    [
        tx.local_sgd(MOMENTUM, tx.mean("data"), 2, state="average"),
        tx.diloco(MOMENTUM, tx.mean("data"), 2),
        tx.post_local_sgd(MOMENTUM, tx.mean("data"), 2, 1),
    ],
)
@pytest.mark.parametrize(
    "params", [{}, {"w": torch.zeros(0)}, {"w": torch.zeros(2), "e": torch.zeros(0, 3), "s": torch.tensor(1.0)}]
)
def test_empty_trees_and_empty_leaves(pipeline: tx.Pipeline, params: Any) -> None:
    def one_rank(scale: float) -> Any:
        p, state = params, pipeline.init(params)
        for _ in range(4):
            p, state = pipeline.step(p, {k: torch.full_like(v, scale) for k, v in params.items()}, state)
        return p

    first, second = tx.simulate(one_rank, {"data": 2}, [1.0, 3.0])
    assert max_diff(first, second) == 0 and first.keys() == params.keys()


def test_parameters_of_several_dtypes() -> None:
    pipeline = tx.local_sgd(tx.sgd(1.0), tx.mean("data"), 1)
    params = {"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.float64), "c": torch.zeros(2, dtype=torch.bfloat16)}

    def one_rank(scale: float) -> Any:
        grads = {k: torch.full_like(v, scale) for k, v in params.items()}
        return pipeline.step(params, grads, pipeline.init(params))[0]

    for found in tx.simulate(one_rank, {"data": 2}, [1.0, 3.0]):
        assert {k: (v.dtype, v.tolist()) for k, v in found.items()} == {
            k: (v.dtype, [-2.0, -2.0]) for k, v in params.items()
        }


@pytest.mark.parametrize(
    "pipeline",
    [
        tx.local_sgd(MOMENTUM, tx.mean("data"), 3, state="average"),
        tx.local_sgd(MOMENTUM, tx.error_feedback(tx.compress(tx.int8(), tx.mean("data"))), 3),
        tx.diloco(MOMENTUM, tx.error_feedback(tx.compress(tx.int4(), tx.mean("data"))), 4, fragments=2, delay=1, mix=0.5),
        tx.diloco(MOMENTUM, tx.error_feedback(tx.compress(tx.top_k(0.5), tx.mean("data"))), 4),
        tx.fuse(tx.identity(), MOMENTUM, after=tx.chain(tx.every(2, tx.average_parameters("data"), first=0), tx.ema(0.5))),
    ],
    ids=["average", "int8", "streaming", "top_k", "ema"],
)  # fmt: skip
def test_many_ranks_in_one_process(pipeline: tx.Pipeline) -> None:
    """As many ranks as a laptop simulates."""

    def one_rank(target: torch.Tensor, weight: torch.Tensor) -> Any:
        p = {"a": torch.zeros(4, 2, dtype=torch.float64), "b": torch.zeros(3, dtype=torch.float64)}
        state = pipeline.init(p)
        for step in range(8):
            grads = {k: v - target[0] * (step + 1) + target[1] for k, v in p.items()}
            p, state = pipeline.step(p, grads, state, weight=weight)
        return p

    gen = torch.Generator().manual_seed(0)
    for ranks in 8, 64:
        targets = list(torch.randn(ranks, 2, generator=gen, dtype=torch.float64))
        weights = list(torch.randint(0, 3, (ranks,), generator=gen).double())
        found = tx.simulate(one_rank, {"data": ranks}, targets, weights)
        assert all(torch.isfinite(v).all() for v in found[0].values())


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_anchor_gathers_small_changes(dtype: torch.dtype, delay: int) -> None:
    """One of four ranks moves by 2 in each step; bfloat16 has steps of 2 above 256, and of 1 below."""
    pipeline = tx.diloco(tx.sgd(1.0), tx.mean("data"), 1 + delay, outer=tx.sgd(1.0), delay=delay)

    def one_rank(rank: int) -> float:
        p: Any = {"w": torch.full((1,), 256.0, dtype=dtype)}
        state = pipeline.init(p)
        for step in range(40):
            live = step % 2 == 1 or not delay  # a message with a delay replaces what is trained meanwhile
            grads = {"w": torch.full((1,), 2.0 * live * (rank == 0), dtype=dtype)}
            p, state = pipeline.step(p, grads, state, weight=1.0)
        return pipeline.flush(p, state)[0]["w"].item()

    assert tx.simulate(one_rank, {"data": 4}, list(range(4))) == [246.0 if delay else 236.0] * 4


@pytest.mark.parametrize("over", ["weight", "world"])
def test_a_rank_without_input_has_no_change_by_rounding(over: Any) -> None:
    pipeline = tx.diloco(tx.sgd(1.0), tx.mean("data", over=over), 1, outer=tx.sgd(0.25))

    def one_rank(rank: int) -> list[float]:
        p: Any = {"w": torch.full((1,), 256.0, dtype=torch.bfloat16)}
        state, seen = pipeline.init(p), []
        for step in range(20):
            grads = {"w": torch.full((1,), 2.0, dtype=torch.bfloat16)}
            p, state = pipeline.step(p, grads, state, weight=float(step < 8 and rank == 0))
            seen.append(state.after.anchor["w"].item())
        return seen

    share = 1.0 if over == "weight" else 0.25
    want = [256.0 - 0.5 * share * min(step + 1, 8) for step in range(20)]
    assert tx.simulate(one_rank, {"data": 4}, list(range(4))) == [want] * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("after", [tx.average_parameters("data"), tx.outer_step(MEAN, tx.sgd(1.0))])
def test_sixteen_bits(after: tx.Transform, dtype: torch.dtype) -> None:
    """Weights of many tokens overflow nothing, and the mean of equal parameters is that parameter."""

    def one_rank(value: float, other: float, weight: float) -> Any:
        p = {"a": torch.tensor([value], dtype=dtype), "b": torch.tensor([other], dtype=dtype)}
        return after.update(p, after.init({"a": p["a"] * 0, "b": p["b"] * 0}), weight=weight)[0]

    for found in tx.simulate(one_rank, {"data": 3}, [1.1, 1.1, 1.1], [60.0, 30.0, 0.0], [5000.0, 10000.0, 15000.0]):
        assert found["a"].dtype is dtype and found["a"].tolist() == torch.tensor([1.1], dtype=dtype).tolist()
        assert found["b"].tolist() == [20.0]
