"""Steps on what the caller gives up equal pure steps; what cannot be given up is copied, and what was given up is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text
from tests.optimizer_table import OPTIMIZERS

ADAM = tx.adamw(0.1, weight_decay=0.1)
PIPELINES: dict[str, Callable[[], tx.Pipeline]] = {
    **{
        f"{name} {i}": (lambda make=make: tx.fuse(tx.mean("data"), make()))
        for name, makes in OPTIMIZERS.items()
        for i, make in enumerate(makes)
    },
    "clip": lambda: tx.fuse(tx.chain(tx.mean("data"), tx.clip_by_global_norm(0.1)), ADAM),
    "skip": lambda: tx.skip_if_nonfinite(tx.fuse(tx.mean("data"), ADAM)),
    "scale": lambda: tx.dynamic_loss_scale(tx.fuse(tx.mean("data"), ADAM)),
    "fed back": lambda: tx.fuse(tx.error_feedback(tx.compress(tx.int8(), tx.mean("data"))), ADAM),
    "power": lambda: tx.fuse(tx.error_feedback(tx.power_sgd("data", 2)), ADAM),
    "power, batched": lambda: tx.fuse(
        tx.error_feedback(tx.batched_power_sgd("data", 2, min_compression_rate=1.0)), ADAM
    ),
    "power, by path": lambda: tx.fuse(
        tx.partition({"a.*": tx.error_feedback(tx.power_sgd("data", 2)), "*": tx.power_sgd("data")}), ADAM
    ),
    "cast, then clip": lambda: tx.fuse(
        tx.chain(tx.compress(torch.bfloat16, tx.mean("data")), tx.clip_by_value(0.5)), ADAM
    ),
    "encoded": lambda: tx.fuse(tx.compress(tx.int8(), tx.mean("data", over="world")), ADAM),
    "encoded by chance": lambda: tx.fuse(tx.compress(tx.int4(stochastic=True), tx.mean("data")), ADAM),
    "average": lambda: tx.fuse(tx.identity(), ADAM, after=tx.every(2, tx.average_parameters("data"), first=0)),
    "ema": lambda: tx.fuse(tx.mean("data"), ADAM, after=tx.ema(0.5)),
    "accumulate": lambda: tx.fuse(tx.every(2, tx.mean("data")), ADAM),
    "zero": lambda: tx.zero(tx.mean("data"), ADAM, "data"),
    "kept": lambda: tx.fuse(tx.chain(tx.mean("data"), kept(lambda values, params: values)), ADAM),
    "kept as they are": lambda: tx.fuse(kept(lambda values, params: values), ADAM),
    "parameters kept": lambda: tx.fuse(kept(lambda values, params: params), ADAM),
    "kept at the end": lambda: tx.fuse(tx.mean("data"), ADAM, after=kept(lambda values, params: values)),
    "local": lambda: tx.local_sgd(ADAM, tx.mean("data"), 2),
    "local, fed back": lambda: tx.local_sgd(tx.sgd(0.1), tx.error_feedback(tx.power_sgd("data")), 2),
    "diloco": lambda: tx.diloco(ADAM, tx.mean("data"), 2, fragments=2),
    "diloco, late": lambda: tx.diloco(ADAM, tx.mean("data"), 2, delay=1, mix=0.5),
}


def kept(of: Callable[[Any, Any], Any]) -> tx.Transform:
    """Adds a tenth of what its state holds, which is what it got in the step before: its input, or the parameters."""

    def update(values: Any, state: Any, params: Any = None) -> Any:
        return optree.tree_map(lambda x, y: x + 0.1 * y, values, state), of(values, params)

    return tx.Transform(lambda params: params, update)


def params_of(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    gen = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=gen).to(dtype)  # noqa: E731
    # A large leaf travels alone; others are packed.
    return {"a": {"weight": rand(300, 250), "bias": rand(7)}, "b": {"weight": rand(4, 3).t(), "bias": rand(0)}}


def train(rank: Any, make: Callable[[], tx.Pipeline], donate: bool, dtype: torch.dtype = torch.float32) -> Any:
    params, pipeline = params_of(dtype=dtype), make()
    state, rank = pipeline.init(params), int(rank)
    for i in range(4):
        grads = params_of(1 + 10 * rank + i, dtype)
        if i == 2 and rank == 1 and hasattr(state, "inner"):
            grads["a"]["bias"][0] = torch.inf
        weight = 0.0 if (rank, i) == (2, 3) else float(1 + rank)
        params, state = pipeline.step(params, grads, state, weight=weight, donate=donate)
    return params, state


KEEPING = [name for name in PIPELINES if name.startswith(("kept", "parameters", "local", "diloco"))]


@pytest.mark.parametrize("name", KEEPING)
def test_what_a_transform_keeps_is_not_stepped(name: str) -> None:
    test_it_is_the_pure_step(name)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [name for name in PIPELINES if name not in KEEPING])
def test_it_is_the_pure_step(name: str) -> None:
    """In other dtypes and with two ranks too, where gradients are encoded or of a low rank."""
    kinds = [(3, torch.float32)]
    if name.startswith(("power", "cast", "encoded", "fed back")):
        kinds += [(2, torch.float32), (2, torch.float64), (3, torch.bfloat16)]
    for ranks, dtype in kinds:
        want, got = (
            tx.simulate(lambda r, d=donate: train(r, PIPELINES[name], d, dtype), {"data": ranks}, [*range(ranks)])  # noqa: B023
            for donate in (False, True)
        )
        torch.testing.assert_close(optree.tree_leaves(got), optree.tree_leaves(want), rtol=0, atol=0)


def test_power_sgd_writes_the_mean_into_gradients_that_are_donated() -> None:
    def one_rank(donated: bool) -> bool:
        hook, grads = tx.power_sgd("data", 2), {"": torch.ones(40, 30)}
        out, _ = hook.update(grads, hook.init(grads), weight=2.0, donated=donated)
        return out[""].data_ptr() == grads[""].data_ptr()

    for donated in (False, True):
        assert tx.simulate(one_rank, {"data": 3}, [donated] * 3) == [donated] * 3


class Made(TorchDispatchMode):
    """The largest memory that an operation makes, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        before = {x.untyped_storage().data_ptr() for x in optree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in optree.tree_leaves(out):
            if isinstance(x, Tensor) and not x.is_meta and x.untyped_storage().data_ptr() not in before:
                self.largest = max(self.largest, x.numel())
        return out


@pytest.mark.parametrize("donate", [False, True])
def test_donated_step_allocates_no_large_tensors(donate: bool) -> None:
    pipeline, params, grads = tx.fuse(tx.mean("data"), tx.adamw(0.1)), params_of(), params_of(1)
    params["a"]["weight"], grads["a"]["weight"] = torch.ones(1200, 1000), torch.ones(1200, 1000)
    state = pipeline.init(params)
    with fjoin.bind(fjoin.mesh({"data": -1})), Made() as made:
        new, _ = pipeline.step(params, grads, state, donate=donate)
    assert (made.largest >= 1_200_000) != donate
    assert (new["a"]["weight"] is params["a"]["weight"]) == donate


def test_a_donated_state_is_refused() -> None:
    pipeline, params = tx.skip_if_nonfinite(tx.fuse(tx.identity(), ADAM)), params_of()
    state = pipeline.init(params)
    kept = optree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, state)
    raises_text(ValueError, lambda: pipeline.step(params, {}, state, donate=True), "differ in structure")
    pipeline.step(params, params_of(1), state, donate=True)  # the call that was refused has not used it up
    for donate in (False, True):
        with pytest.raises(fjoin.DonatedState, match="use the state that the step returned"):
            pipeline.step(params, params_of(1), state, donate=donate)
    pipeline.step(params, params_of(1), kept)
    raises_text(TypeError, lambda: pipeline.step(params, params_of(1), kept, donate=1), "donate")


def odd_field(x: Tensor) -> Any:
    """Changes one field of a state."""
    return lambda params, state: state._replace(
        optimizer={**state.optimizer, "w": state.optimizer["w"]._replace(exp_avg=x)}
    )


def other_data(params: Any, state: Any) -> Any:
    params["w"].data = torch.ones(4)
    return state


CHANGES = {
    "a state of another shape": (odd_field(torch.zeros(4)), "state['w'].exp_avg"),
    "a state of another dtype": (odd_field(torch.zeros(3, dtype=torch.int64)), "state['w'].exp_avg"),
    "a state of another optimizer": (
        lambda params, state: tx.fuse(tx.identity(), tx.sgd(0.1, momentum=0.9)).init(params), "state['w']"
    ),
    "a parameter with other memory": (other_data, "grads['w'] has shape (3,), but params['w'] has shape (4,)"),
}  # fmt: skip


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_between_steps_is_checked_again(name: str, donate: bool) -> None:
    pipeline, params, (change, text) = tx.fuse(tx.mean("data"), ADAM), {"w": torch.ones(3)}, CHANGES[name]
    state, grads = pipeline.init(params), lambda: {"w": torch.ones(3)}
    with fjoin.bind(fjoin.mesh({"data": 1})):  # behind a mean alone nothing else looks at the gradients
        for _ in range(3):
            params, state = pipeline.step(params, grads(), state, donate=donate)
        raises_text(
            ValueError,
            lambda: pipeline.step(params, {"w": torch.ones(4)}, state, donate=donate),
            "grads['w'] has shape (4,)",
        )
        state = change(params, state)
        raises_text((ValueError, TypeError), lambda: pipeline.step(params, grads(), state, donate=donate), text)


def grads_that_share() -> dict[str, Any]:
    one = torch.ones(3, 4)
    flat = torch.arange(24.0)
    return {
        "the same": {"a": one, "b": one},
        "overlapping": {"a": flat[:12].view(3, 4), "b": flat[6:18].view(3, 4)},
        "expanded": {"a": torch.ones(()).expand(3, 4), "b": torch.ones(4).expand(3, 4)},
        "with gaps": {"a": torch.ones(3, 8)[:, ::2], "b": torch.ones(3, 4)},
    }


@pytest.mark.parametrize("how", [*grads_that_share(), "parameters"])
def test_gradients_that_share_memory(how: str) -> None:
    def run(rank: Any, donate: bool) -> Any:
        pipeline, params = tx.fuse(tx.mean("data"), tx.sgd(0.1)), {"a": torch.ones(3, 4), "b": torch.full((3, 4), 2.0)}
        grads = params if how == "parameters" else grads_that_share()[how]
        return pipeline.step(params, grads, pipeline.init(params), weight=1.0 + rank, donate=donate)[0]

    want, got = (tx.simulate(run, {"data": 2}, [0.0, 1.0], [donate] * 2) for donate in (False, True))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_an_empty_leaf_hides_no_shared_memory() -> None:
    def run(donate: bool) -> Tensor:
        flat, pipeline = torch.arange(110.0), tx.fuse(tx.identity(), tx.sgd(0.1))
        params, grads = {"a": flat[:60], "e": flat[0:0]}, {"a": flat[50:], "e": flat[50:50]}
        return pipeline.step(params, grads, pipeline.init(params), donate=donate)[0]["a"]

    torch.testing.assert_close(run(True), run(False), rtol=0, atol=0)


def test_parameters_that_share_memory_are_not_stepped_twice() -> None:
    pipeline, both = tx.fuse(tx.identity(), tx.sgd(0.5)), torch.ones(3)
    params, grads = {"a": both, "b": both}, {"a": torch.ones(3), "b": torch.full((3,), 2.0)}
    new, _ = pipeline.step(params, grads, pipeline.init(params), donate=True)
    assert (new["a"] == 0.5).all() and (new["b"] == 0.0).all()


def test_donated_step_is_pure_under_grad() -> None:
    pipeline, w = tx.fuse(tx.identity(), tx.sgd(0.5)), torch.ones(3)

    def after(w: Tensor) -> Tensor:
        return (pipeline.step({"w": w}, {"w": w * w}, pipeline.init({"w": w}), donate=True)[0]["w"] ** 2).sum()

    with torch.no_grad():  # a derivative through a step
        torch.testing.assert_close(torch.func.grad(after)(w), 2 * (w - 0.5 * w**2) * (1 - w))
    assert (w == 1).all()


def test_backward_raises_if_a_step_overwrote_its_values() -> None:
    pipeline, w = tx.fuse(tx.identity(), ADAM), torch.ones(3, requires_grad=True)
    loss = (w * w).sum()
    pipeline.step({"w": w}, {"w": torch.ones(3)}, pipeline.init({"w": w}), donate=True)
    raises_text(RuntimeError, lambda: loss.backward(), "modified by an inplace operation")
