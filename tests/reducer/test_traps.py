"""Traps between autograd, memory and accumulation: each once gave wrong numbers without a word."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from fjoin.buckets import GradBuffer
from tests.helpers import by_hand, judged, max_diff, raises_text, stepped
from tests.training.small import net_batch, net_loss, net_params, step_of

MEAN_SGD = tx.fuse(tx.mean("data"), tx.sgd(1.0))


def _linear(params: Any, batch: Any) -> Tensor:
    return (params["w"] * batch).sum()


def _w(n: int = 2) -> dict[str, Tensor]:
    return {"w": torch.zeros(n)}


@pytest.mark.parametrize("hook", [tx.mean("data"), tx.chain(tx.clip_by_value(1e9), tx.mean("data"))], ids=["mean", "other"])  # fmt: skip
@pytest.mark.parametrize(("ranks", "window", "size"), [(1, 1, 1000), (3, 1, 2), (1, 3, 2)])
def test_gradients_that_share_memory_are_distinct(ranks: int, window: int, hook: tx.Transform, size: int) -> None:
    """autograd hands two leaves views of one gradient: summed in place they would be summed twice. A second micro-batch adds in place
    to the first one's gradient."""

    def one_rank() -> Any:
        step = fjoin.train_step(
            lambda p, b: ((p["a"][None] + p["b"][None]) * torch.ones(1) * b).sum(), tx.fuse(hook, tx.sgd(1.0)), weight=lambda b: 3,
            accumulate=window,
        )  # fmt: skip
        state = step.init({"a": torch.zeros(size, 1000), "b": torch.zeros(size, 1000)})
        params = stepped(step, state, (1.0, 2.0, 6.0)[:window]).params
        return params["a"].unique().tolist(), params["b"].unique().tolist()

    want = [-1.0 if window == 1 else -3.0]
    assert tx.simulate(one_rank, {"data": ranks}) == [(want, want)] * ranks


def test_a_gradient_that_arrives_twice_is_refused() -> None:
    def loss(params: Any, batch: Tensor) -> Tensor:
        x = batch.clone().requires_grad_()
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(lambda x: x + params["w"], x, use_reentrant=True)
        return x.sum()

    step, state = step_of(loss, MEAN_SGD, _w())
    raises_text(RuntimeError, lambda: step(state, torch.ones(2)), "'w' arrived twice", "use_reentrant=False")


@pytest.mark.parametrize("window", [1, 2])
def test_backward_inside_the_loss_is_refused_and_changes_nothing(window: int) -> None:
    """In the last call of a window too, whose gradients would be added to those of the first."""
    calls = iter([False] * (window - 1) + [True] + [False] * window)

    def loss(params: Any, batch: Any) -> Tensor:
        (found,) = torch.autograd.grad((params["w"] * 100).sum(), params["w"])  # which adds none
        loss = _linear(params, batch) + 0 * found.sum()
        if next(calls):
            loss.backward(retain_graph=True)
        return loss

    step = fjoin.train_step(loss, MEAN_SGD, accumulate=window)
    state = stepped(step, step.init(_w()), [1.0] * (window - 1))
    raises_text(RuntimeError, lambda: step(state, 1.0), "return the loss", "torch.autograd.grad")
    state = stepped(step, state if window == 1 else state.clone(), [1.0] * window)
    assert state.params["w"].tolist() == [-1.0, -1.0]


def test_transforms_of_parameters_do_not_accumulate() -> None:
    after = tx.fuse(tx.mean("data"), tx.sgd(1.0), after=tx.accumulate(2, tx.identity()))
    raises_text(ValueError, lambda: fjoin.train_step(_linear, after), "every(steps, ...)")


def test_optimizers_start_from_the_parameters_that_all_have() -> None:
    """Which masters of 32 bits keep."""

    def one_rank(value: float) -> float:
        pipeline = tx.fuse(tx.mean("data"), tx.mixed_precision(tx.sgd(0.0)))
        step, state = step_of(_linear, pipeline, {"w": torch.full((1,), value, dtype=torch.bfloat16)})
        return stepped(step, state, [1.0]).params["w"].item()  # type: ignore[no-any-return]

    assert tx.simulate(one_rank, {"data": 3}, [1.0, 2.0, 3.0]) == [1.0] * 3


def test_a_state_of_an_earlier_init_is_refused() -> None:
    step, old = step_of(_linear, MEAN_SGD, _w(4))
    new = step.init(_w(3))
    raises_text(ValueError, lambda: step(old, 1.0), "earlier init")
    new, _ = step(new, 1.0)
    assert new.step == 1


# -- large gradients are sent from the memory in which autograd hands them over, unless others share it --

SIDE = 1024  # float32 matrices of 4 MB, each a bucket of its own


def loss_fn(p: Any, x: Tensor) -> Tensor:
    hidden = torch.tanh(torch.tanh(x @ p["first"] + p["bias"]) @ p["second"])
    both = p["left"].view(-1) + p["right"].view(-1)  # its gradient is that of either, in one memory
    return (hidden**2).mean() + (both**2).mean() + p["expanded"].sum()


def taken(loss: Any) -> tuple[dict[str, bool], dict[str, int], dict[str, float]]:
    """By path, in the third step: whether the gradient's memory is sent, its address, and an error of the parameters."""
    torch.manual_seed(0)
    shapes = dict.fromkeys(("first", "second", "left", "right", "expanded"), (SIDE, SIDE)) | {"bias": (SIDE,)}
    params = {path: torch.randn(shape) / SIDE for path, shape in shapes.items()}
    own, sent, inner = {k: p.clone() for k, p in params.items()}, dict[str, tuple[int, int]](), GradBuffer.take

    def take(out: GradBuffer, places: Any) -> None:
        given = [grad.data_ptr() for leaf in out.leaves if (grad := leaf.grad) is not None]
        inner(out, places)
        if out.direct and given:
            sent[out.layout.paths[0]] = given[0], out.buffer.data_ptr()

    step, state = step_of(loss, tx.fuse(tx.mean("data"), tx.sgd(0.1)), params, mesh=fjoin.mesh({"data": 1}))
    with mock.patch.object(GradBuffer, "take", take):
        for _ in range(3):
            x = torch.randn(8, SIDE)
            sent.clear()
            grads = torch.func.grad(loss_fn)(own, x)
            own = {path: p - 0.1 * grads[path] for path, p in own.items()}
            state, _ = step(state, x)
    errors = {path: float((p.detach() - own[path]).abs().max()) for path, p in state.params.items()}
    step.close()
    return {path: a == b for path, (a, b) in sent.items()}, {path: b for path, (_, b) in sent.items()}, errors


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_gradient_alone_is_sent_without_a_clone_and_a_shared_one_is_not(compiled: bool) -> None:
    sent, places, errors = taken(torch.compile(loss_fn, backend="aot_eager") if compiled else loss_fn)
    assert sent.keys() == {"first", "second", "left", "right", "expanded"}
    assert sent["first"] and sent["second"] and sent["expanded"], (
        "a gradient was cloned although nothing shares its memory"
    )
    # Once the first of a pair has been cloned, the other one is alone.
    assert sent["left"] + sent["right"] == 1
    assert len(set(places.values())) == len(places), "two buckets are in one memory"
    assert max(errors.values()) < 1e-6


def test_a_use_count_that_takes_shared_gradients_is_found() -> None:
    with mock.patch("fjoin.buckets._grad_buffer._ALONE", 4):
        sent, places, _ = taken(loss_fn)
    assert sent["left"] and sent["right"] and places["left"] == places["right"]


def test_a_use_count_that_clones_every_gradient_is_found() -> None:
    with mock.patch("fjoin.buckets._grad_buffer._ALONE", 1):
        assert not any(taken(loss_fn)[0].values())


def in_any_order(params: Any, batch: tuple[int, torch.Tensor]) -> torch.Tensor:
    """Its gradients come in the order of the number in the batch; of 6 on, the first parameter has none."""
    number, x = batch
    for name in list(itertools.permutations("abc"))[number % 6][number // 6 :]:
        x = torch.tanh(x @ params[name])
    return x.square().mean()


def test_gradients_come_in_another_order_than_in_the_step_before() -> None:
    params = {name: torch.eye(4) + 0.1 * i for i, name in enumerate("abc")}
    own = {name: p.clone() for name, p in params.items()}
    step, state = step_of(in_any_order, tx.fuse(tx.mean("data"), tx.sgd(0.5)), params, mesh=fjoin.mesh({"data": 1}))
    late: list[bool] = []  # of each step, whether the bucket was completed after backward
    for number in (0, 0, 5, 5, 5, 1, 6, 0, 11, 2, 2, 3):
        batch = number, torch.linspace(-1, 1, 12).view(3, 4) + number
        grads = torch.func.grad(in_any_order)(own, batch)
        own = {name: p - 0.5 * grads[name] for name, p in own.items()}
        with mock.patch.object(GradBuffer, "fill", autospec=True, side_effect=GradBuffer.fill) as fill:
            state, _ = step(state, batch)
        late.append(fill.called)
        assert all(torch.equal(state.params[name], own[name]) for name in own), number
    assert late[:2] == [False, False] and not late[4], "the order of the last step is not learnt"
    assert late[6] and late[8]  # a parameter has no gradient


# -- hooks run per bucket: memory that is shared, padding, axes --


def smooth(grads: Any, state: Any) -> Any:
    """An average over steps, with a memory of each parameter, and a count of calls."""
    memory, calls = state
    new = {path: 0.5 * memory[path] + g for path, g in grads.items()}
    return new, (new, {path: n + 1 for path, n in calls.items()})


def empty(params: Any) -> Any:
    return {path: torch.zeros_like(p) for path, p in params.items()}, dict.fromkeys(params, 0)


SMOOTH, MEAN, SGD = by_hand(smooth, init=empty), tx.mean("data"), tx.sgd(1.0)


def both_ways(pipeline: tx.Pipeline, batches: list[Tensor], on_device: bool = False) -> tuple[Any, Any, Any, Any]:
    """Parameters and state after a step on each batch, of a train_step and of the pure pipeline."""
    step = judged(fjoin.train_step(net_loss, pipeline, mesh=fjoin.mesh({"data": -1})), on_device)
    state, params = step.init(net_params()), net_params()
    pure = pipeline.init(params)
    with fjoin.bind(fjoin.mesh({"data": -1})):
        for batch in batches:
            state, _ = step(state, batch)
            params, pure = pipeline.step(params, torch.func.grad(net_loss)(params, batch), pure)
    return state.params, state.pipeline, params, pure


BATCHES = [net_batch(0, i) for i in range(3)]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("parts", [(SMOOTH, MEAN), (MEAN, SMOOTH)], ids=["before", "behind"])
def test_nonfinite_first_step_does_not_change_the_hook_state(parts: Any, on_device: bool) -> None:
    """The hook's memory must stay unchanged."""
    pipeline = tx.skip_if_nonfinite(tx.fuse(tx.chain(*parts), tx.sgd(0.1)))
    got, state, want, pure = both_ways(pipeline, [BATCHES[0] * float("nan"), *BATCHES[1:]], on_device)
    assert state.skipped == pure.skipped == 1
    assert max_diff(got, want) < 1e-14 and max_diff(want, net_params()) > 0


def test_state_may_keep_the_parameters_it_was_given() -> None:
    """Parameters in the state of a parameter transform keep their values when the step overwrites the parameters."""

    def pull(new: Any, state: Any) -> Any:
        anchor, before = state
        return {path: 0.5 * new[path] + 0.25 * anchor[path] + 0.25 * before[path] for path in new}, (anchor, new)

    pipeline = tx.fuse(MEAN, tx.sgd(0.1), after=by_hand(pull, init=lambda params: (params, params)))
    got, state, want, pure = both_ways(pipeline, BATCHES)
    assert max_diff((got, state.after), (want, pure.after)) < 1e-14


def test_a_bare_tensor_keeps_its_shape() -> None:
    rows = tx.chain(tx.stateless(lambda g: g / g.norm(dim=-1, keepdim=True)), MEAN)
    batch = torch.tensor([[3.0, 4.0, 0.0], [0.0, 6.0, 8.0]])
    for start, of in ((torch.ones(2, 3), lambda p: p), ({"w": torch.ones(2, 3)}, lambda p: p["w"])):
        step = fjoin.train_step(lambda p, b, of=of: (of(p) * b).sum(), tx.fuse(rows, SGD))
        state, _ = step(step.init(start), batch)
        assert torch.allclose(of(state.params), 1 - batch / batch.norm(dim=-1, keepdim=True))


@pytest.mark.parametrize("function", [lambda g: g / g.abs(), lambda g: 1e30 * (g + 1)], ids=["unit", "grows"])
def test_padding_between_leaves_is_ignored(function: Any) -> None:
    """Leaves begin on 64 bytes; a hook may make NaN of the zeros between them, or more and more."""
    hook, batch = tx.chain(tx.stateless(function, elementwise=True), MEAN), torch.tensor([1.0, 2.0, 3.0])
    step = fjoin.train_step(lambda p, b: (p["w"] * b).sum() + p["v"].sum(), tx.fuse(hook, SGD))
    state = stepped(step, step.init({"w": torch.zeros(3), "v": torch.zeros(5)}), [batch] * 3)
    assert torch.allclose(state.params["w"], -3 * function(batch))


def test_a_state_that_was_kept_is_not_written_into() -> None:
    """A hook that gives the gradients of the step before: its output is a tensor of its old state."""
    first = lambda params: ({path: torch.full_like(p, 10.0) for path, p in params.items()},)  # noqa: E731
    late = by_hand(lambda g, s: (s[0], (g,)), init=first)
    hook = tx.chain(late, tx.clip_by_global_norm(1.0))
    step, old = step_of(lambda p, b: (p["w"] * b).sum(), tx.fuse(hook, SGD), {"w": torch.zeros(3)}, donate=False)
    step(old, torch.ones(3))
    assert old.pipeline.hook[0][0]["w"].tolist() == [10.0] * 3


@pytest.mark.parametrize("needs", [tx.Needs.LEAVES, tx.Needs.TREE])
def test_a_hook_may_give_leaves_each_others_gradients(needs: Any) -> None:
    swap = by_hand(lambda g, state: ({"a": g["b"], "b": g["a"]}, ()), needs)
    start = {"a": torch.zeros(2), "b": torch.zeros(2)}
    for pipeline in (tx.fuse(swap, SGD), tx.fuse(MEAN, SGD, after=swap)):
        step = fjoin.train_step(lambda p, b: 3 * p["a"].sum() + p["b"].sum(), pipeline)
        state, _ = step(step.init(start), None)
        assert (state.params["a"].tolist(), state.params["b"].tolist()) == ([-1.0] * 2, [-3.0] * 2)
    square = torch.arange(4.0).view(2, 2)
    step = fjoin.train_step(lambda p, b: (p["w"] * square).sum(), tx.fuse(tx.stateless(torch.t), SGD))
    state, _ = step(step.init({"w": torch.zeros(2, 2)}), None)
    assert torch.equal(state.params["w"], -square.t())


def returning(given: Any, needs: Any) -> tx.Transform:
    return by_hand(lambda g, state: (given, state), needs)


TREES = (tx.Needs.LEAVES, tx.Needs.TREE)
# A hook that returns something else, the type of the error, and its words.
WRONG: list[tuple[Any, ...]] = [
    (tx.stateless(lambda g: g.mean()), ValueError, "'w'", "shape ()", "expected (2,)"),
    (returning(None, TREES[0]), ValueError, "returned None"),
    *((returning(given, needs), TypeError, "'w'", f"returned {text}, expected a tensor of shape (2,)") for needs in TREES
      for given, text in (({"w": 1.0}, "a value of type float"), ({"w": None}, "nothing"), ({}, "nothing"), (3, "a value of type int"))),
]  # fmt: skip


@pytest.mark.parametrize("row", range(len(WRONG)))
def test_hooks_that_return_something_else_are_refused(row: int) -> None:
    hook, kind, *texts = WRONG[row]
    step, state = step_of(lambda p, b: p["w"].sum(), tx.fuse(hook, SGD), {"w": torch.zeros(2)})
    raises_text(kind, lambda: step(state, None), *texts)


def states_alive() -> list[int]:
    """How many of a hook's old states live on after each step, without Python's search for cycles."""
    seen: list[Any] = []

    def update(grads: Any, state: Any) -> Any:
        out, new = smooth(grads, state)
        seen.extend(weakref.ref(m) for m in new[0].values())
        return out, new

    hook = tx.chain(by_hand(update, init=empty), MEAN)
    step = fjoin.train_step(net_loss, tx.fuse(hook, tx.sgd(0.1)), mesh=fjoin.mesh({"data": -1}), bucket_bytes=100)
    state, counts = step.init(net_params()), []
    gc.collect()
    gc.disable()
    try:
        for i in range(4):
            state, _ = step(state, net_batch(0, i))
            counts.append(sum(ref() is not None for ref in seen))
    finally:
        gc.enable()
    return counts


def test_old_states_are_freed_at_once(pool: Any) -> None:
    for counts in pool.run(2, states_alive):
        assert counts == counts[:1] * 4, counts
