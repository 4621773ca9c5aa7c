"""Specs, explanations, means, lanes and what decides when: the parts that are not laws."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch
from helpers import max_diff, raises_text, same_bits
from torch import Tensor

from fjoin import transforms as tx
from fjoin.transforms._layout import make_layout
from fjoin.transforms.sync._lane import decode_lane, encode_lane, host_lane, host_words, rank_bit, ranks_in

FULL = tx.fuse(
    tx.chain(tx.clip_by_value(9.0), tx.mean(("node", "local"), over="live"), tx.clip_by_global_norm(1.0)),
    tx.partition(
        {
            ("*bias", "*norm*"): tx.sgd(tx.constant(0.1)),
            "*": tx.adamw(tx.warmup_cosine(3e-4, 100, 2000), weight_decay=0.1),
        }
    ),
)


def _double(g: Tensor) -> Tensor:
    return g * 2


def test_a_pipeline_reads_as_it_is_written() -> None:
    assert repr(FULL) == (
        "fuse(chain(clip_by_value(9.0), mean(('node', 'local'), over='live'), clip_by_global_norm(1.0)), "
        "partition({('*bias', '*norm*'): sgd(lr=constant(0.1)), "
        "'*': adamw(lr=warmup_cosine(0.0003, 100, 2000), weight_decay=0.1)}))"
    )
    assert eval(repr(FULL), vars(tx)) == FULL


def test_json_round_trip() -> None:
    text = tx.to_json(FULL)
    json.loads(text)
    assert tx.from_json(text) == FULL and tx.fingerprint(tx.from_json(text)) == tx.fingerprint(FULL)
    custom = tx.chain(tx.stateless(_double), tx.mean("data"))
    name = f"{_double.__module__}._double"
    raises_text(ValueError, lambda: tx.from_json(tx.to_json(custom)), repr(name), "functions=")
    assert tx.from_json(tx.to_json(custom), {name: _double}) == custom


def test_equality_is_of_meaning() -> None:
    assert tx.sgd(0.1) == tx.sgd(lr=0.1) == tx.sgd(0.1, momentum=0.0)
    assert tx.sgd(0.1) != tx.sgd(0.2) and tx.adam(0.1) != tx.adamw(0.1) and tx.mean("a") != tx.mean("b")
    assert tx.chain(tx.mean("a"), tx.chain(tx.noop(), tx.identity())) == tx.chain(tx.mean("a"), tx.noop())
    assert tx.chain() == tx.identity() and tx.chain(tx.noop()) == tx.noop()
    assert tx.fingerprint(tx.stateless(lambda g: g * 2)) != tx.fingerprint(tx.stateless(lambda g: g * 3))
    assert len({tx.mean("a"), tx.mean("a"), tx.mean("b")}) == 2


def test_a_users_factory_is_data_too() -> None:
    @tx.factory
    def times_for_test(factor: float) -> tx.Transform:
        return tx.stateless(lambda g: g * factor, scope="element")

    made = times_for_test(2.0)
    assert made.spec.name == "stateless", "what a factory passes on keeps its own name"

    @tx.factory
    def halve_for_test(factor: float = 0.5) -> tx.Transform:
        return tx.Transform(lambda p: (), lambda g, s, p=None, **e: (g * factor, s), scope="element")

    assert repr(halve_for_test()) == "halve_for_test()" and tx.from_json(
        tx.to_json(halve_for_test(0.25))
    ) == halve_for_test(0.25)

    def mean(axis: str) -> tx.Transform:
        return tx.identity()

    raises_text(ValueError, lambda: tx.factory(mean), "'mean' exists already")


def test_explain_covers_what_runs_now_and_then() -> None:
    params = {"w": torch.zeros(1000), "b": torch.zeros(10)}
    pipeline = tx.fuse(
        tx.chain(tx.switch_after(5, tx.mean("data"), tx.every(3, tx.sum_over("data"))), tx.clip_by_global_norm(1.0)),
        tx.partition({"b": tx.sgd(0.1), "*": tx.adam(0.1)}),
    )
    what = tx.explain(pipeline, params, {"data": 4})
    assert [(r.stage, r.when, len(r.messages)) for r in what.rows] == [
        ("mean('data')", "before step 5", 1),
        ("sum_over('data')", "from step 5, every 3 steps", 1),
        ("clip_by_global_norm(1.0)", "each step", 0),
        ("(the step's own counts)", "each step", 1),
        ("adam(lr=0.1)", "each step, 1 of 2 leaves", 0),
        ("sgd(lr=0.1)", "each step, 1 of 2 leaves", 0),
    ] or [r.stage for r in what.rows][-2:] == ["sgd(lr=0.1)", "adam(lr=0.1)"]
    text = str(what)
    assert "psum(data)" in text and "total per rank and step" in text and "before step 5" in text
    assert what.rows[0].messages[0].sent_bytes == round(what.rows[0].messages[0].payload_bytes * 2 * 3 / 4)


def test_explain_takes_no_memory_for_huge_models() -> None:
    params = {f"p{i}": torch.empty(10**9, device="meta") for i in range(70)}
    what = tx.explain(tx.fuse(tx.mean("data"), tx.adamw(0.1)), params, {"data": 512})
    assert what.state_bytes == 70 * 8 * 10**9 + 4 + 8 and what.messages == 71


def test_explain_says_where_it_cannot_look_ahead() -> None:
    def peek(g: Any, s: Any, params: Any = None, **extra: Any) -> Any:
        return (g, s) if g["w"].sum().item() > 0 else (tx.psum(g, "data"), s)

    part = tx.chain(tx.mean("data"), tx.Transform(lambda p: (), peek))
    raises_text(
        TypeError, lambda: tx.explain(part, {"w": torch.zeros(3)}, {"data": 2}), "peek", "reads a tensor's value"
    )


def test_explain_of_nested_axes() -> None:
    what = tx.explain(tx.mean(("node", "local")), {"w": torch.zeros(10)}, {"node": 2, "local": 4})
    assert [(m.axis, m.collective) for m in what.rows[0].messages] == [("node x local", "psum")]
    what = tx.explain(tx.mean("local"), {"w": torch.zeros(10)}, {"node": 2, "local": 4})
    assert [m.axis for m in what.rows[0].messages] == ["local"]


def test_layout() -> None:
    params = {f"p{i}": torch.zeros(10) for i in range(5)} | {
        "big": torch.zeros(1_000_000),
        "half": torch.zeros(3, dtype=torch.float16),
    }
    layout = make_layout(params, lambda path: path in ("p1", "p3"), bucket_bytes=120)
    assert sorted(p for b in layout for p in b.paths) == sorted(params)
    assert [b.direct for b in layout if "big" in b.paths] == [True]
    first = next(b for b in layout if "p4" in b.paths)
    assert first.paths == ("p4", "p2", "p3"), "reverse order, equal labels together"
    assert [(s.start, s.stop, s.paths) for s in first.spans] == [(0, 32, ("p4", "p2")), (32, 48, ("p3",))]
    assert first.offsets == (0, 16, 32), "each leaf begins on a cache line"
    assert all(b.dtype == params[p].dtype for b in layout for p in b.paths)
    assert make_layout({}, lambda path: 0) == ()
    mebibyte = {f"p{i}": torch.zeros(2**18) for i in range(8)}
    assert [len(b.paths) for b in make_layout(mebibyte, lambda path: 0)] == [1, 5, 2], "the first of several is small"
    assert [len(b.paths) for b in make_layout(dict(list(mebibyte.items())[:5]), lambda path: 0)] == [5]


# -- means -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["lockstep", "vmap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_means_by_hand(engine: Any, dtype: torch.dtype) -> None:
    gs = [
        torch.tensor([2.0, 4.0], dtype=dtype),
        torch.tensor([4.0, 8.0], dtype=dtype),
        torch.tensor([64.0, 64.0], dtype=dtype),
    ]
    ws = [torch.tensor(v, dtype=torch.float64) for v in (3.0, 1.0, 0.0)]

    def run(hook: tx.Transform) -> tuple[list[float], float]:
        out = tx.simulate(lambda g, w: hook.update(g, hook.init(g), weight=w), {"data": 3}, gs, ws, engine=engine)
        assert all(same_bits(o[0], out[0][0]) and o[0].dtype == dtype for o in out)
        return out[0][0].tolist(), out[0][1].total.item()

    assert run(tx.mean("data")) == ([2.5, 5.0], 4.0)
    assert run(tx.mean("data", over="live")) == ([3.0, 6.0], 2.0)
    assert (
        run(tx.mean("data", over="world"))[0] == pytest.approx([2.0, 4.0], rel=2**-8)
        and run(tx.mean("data", over="world"))[1] == 3.0
    )
    assert run(tx.sum_over("data")) == ([10.0, 20.0], 4.0)


def test_the_lane_rides_along_and_later_stages_know_the_weight() -> None:
    hook = tx.chain(tx.mean("local"), tx.mean("node"))

    def one_rank(g: float, w: float) -> Any:
        return hook.update(g, hook.init(torch.tensor(g)), weight=w, lane={"loss": w * 10, "n": 1})

    out = tx.simulate(one_rank, {"node": 2, "local": 2}, [1.0, 2.0, 3.0, 100.0], [1.0, 2.0, 3.0, 0.0])
    for g, state in out:
        assert g.item() == pytest.approx((1 + 4 + 9) / 6)
        sums = hook.sums(state)  # type: ignore[misc]
        assert sums.total == 6 and sums.lane["loss"] == 60 and sums.lane["n"] == 4
    raises_text(
        ValueError,
        lambda: tx.simulate(lambda g: tx.mean("data").update(g, (), lane={"total": 1}), {"data": 1}, [1.0]),
        "'total'",
    )


def test_all_weights_zero_give_zero() -> None:
    for hook in (tx.mean("data"), tx.mean("data", over="live")):
        out = tx.simulate(lambda g: hook.update(g, hook.init(g), weight=0), {"data": 2}, [1.0, float("nan")])  # noqa: B023
        assert [o[0].item() for o in out] == [0.0, 0.0]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 100, 512])
def test_a_float32_lane_counts_exactly(ranks: int) -> None:
    """Sums up to 2^48 / ranks to the unit, negative and fractional values to float32's precision or better."""
    g = torch.Generator().manual_seed(ranks)
    top = 2**48 // ranks // ranks
    counts = torch.randint(0, max(top, 2), (ranks,), generator=g).tolist()
    lanes = [{"count": float(c), "minus": -0.125 * c, "loss": 1e-3 * (c % 7), "big": 1e30} for c in counts]
    total = sum(encode_lane(lane, torch.float32, ranks) for lane in lanes)
    out = decode_lane(total, lanes[0], ranks)
    assert out["count"] == sum(counts)
    assert out["minus"] == pytest.approx(-0.125 * sum(counts), rel=1e-7)
    assert out["loss"] == pytest.approx(sum(lane["loss"] for lane in lanes), rel=1e-6)
    assert out["big"] == pytest.approx(1e30 * ranks, rel=1e-7 * ranks)
    for lane in lanes:
        assert host_words(lane, torch.float32, ranks) == pytest.approx(encode_lane(lane, torch.float64, ranks).new_tensor(
            host_words(lane, torch.float32, ranks)).tolist())  # fmt: skip
        assert torch.tensor(host_words(lane, torch.float32, ranks)).equal(encode_lane(lane, torch.float32, ranks))
    assert host_lane(total.tolist(), lanes[0], torch.float32, ranks) == {k: v.item() for k, v in out.items()}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_lane_passes_on_what_is_not_finite(value: float) -> None:
    for dtype in (torch.float32, torch.float64):
        total = encode_lane({"a": value, "b": 1.0}, dtype, 3) + encode_lane({"a": 1.0, "b": 1.0}, dtype, 3)
        out = decode_lane(total, ["a", "b"], 3)
        assert not torch.isfinite(out["a"]) and out["b"] == 2


def test_masks_name_ranks() -> None:
    assert ranks_in([5.0, 2.0]) == (0, 2, 25) and rank_bit(25) == (1, 2.0)


# -- when --------------------------------------------------------------------------------------------


def test_accumulation_is_exact_over_calls_and_ranks() -> None:
    hook = tx.accumulate(2, tx.mean("data"))

    def one_rank(gs: list[float], ws: list[float]) -> Any:
        state, outs = hook.init(torch.tensor(0.0, dtype=torch.float64)), []
        for g, w in zip(gs, ws, strict=True):
            out, state = hook.update(torch.tensor(g, dtype=torch.float64), state, weight=w, lane={"n": w})
            outs.append(out)
        return outs, hook.sums(state)  # type: ignore[misc]

    out = tx.simulate(one_rank, {"data": 2}, [[1.0, 2.0], [3.0, float("nan")]], [[1, 2], [4, 0]])
    for outs, sums in out:
        assert outs[0] is None and outs[1].item() == pytest.approx((1 + 4 + 12) / 7, rel=1e-15)
        assert sums.total == 7 and sums.lane["n"] == 7


def test_nothing_runs_after_an_accumulation_that_goes_on() -> None:
    pipeline = tx.fuse(tx.chain(tx.accumulate(2, tx.identity()), tx.clip_by_value(1.0)), tx.adam(0.1))
    p = {"w": torch.ones(2)}
    state = pipeline.init(p)
    new, state = pipeline.step(p, {"w": torch.ones(2)}, state)
    assert same_bits(new, p) and state.optimizer["w"].step == 0
    new, state = pipeline.step(p, {"w": torch.ones(2)}, state)
    assert not same_bits(new, p) and state.optimizer["w"].step == 1
    inside = tx.masked(tx.accumulate(2, tx.identity()), "w")
    raises_text(ValueError, lambda: inside.update({"w": torch.ones(2)}, inside.init(p)), "put accumulate around it")


def test_skipping_a_pipeline_keeps_everything() -> None:
    pipeline = tx.skip_if_nonfinite(tx.fuse(tx.mean("data"), tx.adam(0.1)))

    def one_rank(g: float) -> Any:
        p = torch.tensor(1.0)
        state = pipeline.init(p)
        p, state = pipeline.step(p, torch.tensor(1.0), state)
        before = (p, state.inner.optimizer)
        p, state = pipeline.step(p, torch.tensor(g), state)
        return same_bits((p, state.inner.optimizer), before), state.skipped.item()

    assert tx.simulate(one_rank, {"data": 2}, [1.0, float("inf")]) == [(True, 1)] * 2
    assert tx.simulate(one_rank, {"data": 2}, [1.0, 2.0]) == [(False, 0)] * 2


def test_fusing_by_hand() -> None:
    """fuse is its parts one after the other."""
    hook, opt = tx.chain(tx.clip_by_value(0.5), tx.clip_by_global_norm(0.3)), tx.adamw(0.1)
    after = tx.stateless(lambda p: p * 0.5)
    pipeline = tx.fuse(hook, opt, after)
    p, g = {"w": torch.ones(3, dtype=torch.float64)}, {"w": torch.arange(3.0, dtype=torch.float64)}
    got, state = pipeline.step(p, g, pipeline.init(p))
    g2, hook_state = hook.update(g, hook.init(p), p)
    p2, opt_state = opt.step(p, g2, opt.init(p))
    assert max_diff(got, {"w": p2["w"] * 0.5}) == 0
    assert same_bits(state, tx.PipelineState(hook_state, opt_state, ()))


def _times(k: Any, grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
    return {path: g * k for path, g in grads.items()}, state


class _Negates:
    def __call__(self, grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return {path: -g for path, g in grads.items()}, state

    def method(self, grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return grads, state


def _by_hand(update: Any) -> tx.Transform:
    return tx.Transform(lambda params: (), update, scope="leaf")


def test_what_is_written_by_hand_is_known_by_its_function_inside_others_too() -> None:
    """Functions, partials with their arguments, objects that are called and methods: two ranks' must not be taken for equal."""
    made = [_Negates(), _Negates().method, *(functools.partial(_times, k) for k in (2.0, 3.0)),
            functools.partial(_times, k=2.0), functools.partial(_times, object())]  # fmt: skip
    for wrap in (lambda t: t, lambda t: tx.chain(tx.mean("data"), t), lambda t: tx.fuse(t, tx.sgd(0.1))):
        assert len({tx.fingerprint(wrap(_by_hand(update))) for update in made}) == len(made)
        assert tx.fingerprint(wrap(_by_hand(_Negates()))) == tx.fingerprint(wrap(_by_hand(_Negates())))
        assert wrap(_by_hand(made[0])) != wrap(_by_hand(made[1]))
    both = tx.chain(tx.mean("data"), _by_hand(made[2]))
    assert repr(both) == "chain(mean('data'), custom(partial(_times, 2.0)))"
    assert repr(_by_hand(made[0])) == "custom(_Negates)"
    raises_text(TypeError, lambda: tx.to_json(both), "written by hand", "@factory")


def test_explain_finds_what_runs_now_and_then_inside_others() -> None:
    """As many messages, and in the same steps, whichever of two wrappers is the outer one."""
    params, mean = {"w": torch.zeros(1000), "v": torch.zeros(10)}, tx.mean("data")

    def rows(hook: tx.Transform) -> list[Any]:
        return [(row.when, row.messages) for row in tx.explain(hook, params, {"data": 4}).rows]

    cast = lambda hook: tx.cast(torch.bfloat16, hook)  # noqa: E731
    (now_and_then,) = rows(tx.every(2, cast(mean)))
    assert now_and_then[0] == "every 2 steps" and len(now_and_then[1]) == 2
    for hook in (
        cast(tx.every(2, mean)),
        tx.error_feedback(cast(tx.every(2, mean))),
        tx.masked(tx.every(2, cast(mean)), "*"),
    ):
        ((when, messages),) = rows(hook)
        assert when == "every 2 steps" and [m.collective for m in messages] == [m.collective for m in now_and_then[1]]
    assert rows(cast(tx.chain(tx.clip_by_value(1.0), tx.every(2, mean))))[1] == now_and_then
    assert [when for when, _ in rows(cast(tx.switch_after(1, tx.noop(), mean)))] == ["before step 1", "from step 1"]
    by_path = rows(tx.partition({"w": tx.every(2, mean), "*": mean}))
    assert [(when, [m.payload_bytes for m in messages]) for when, messages in by_path] == [
        ("every 2 steps", [4008]), ("each step", [48])
    ]  # fmt: skip
    ((when, messages),) = rows(tx.skip_if_nonfinite(tx.every(2, mean)))
    assert when == "every 2 steps" and len(messages) == 1
