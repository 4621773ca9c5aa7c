"""States: donation, clones, memory, going back to an earlier one."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import nn

import fjoin
from fjoin import transforms as tx
from tests.helpers import max_diff, raises_text, same_bits, seen_by, stepped
from tests.training.small import MEAN_SGD, X, one, quadratic, start, step_of
from tests.training.test_functional import TOKENS, Tied


def test_a_donated_state_cannot_be_used_again() -> None:
    step, first = one(tx.fuse(tx.mean("data"), tx.sgd(0.1)))
    kept = first.clone()
    second, _ = step(first, X)
    for use in (lambda: step(first, X), lambda: first.params, lambda: first.clone(), lambda: first.pipeline):
        raises_text(fjoin.DonatedState, use, "donated to step 0", "state, metrics = step(state, batch)", "donate=False")
    assert same_bits(kept.params, start())
    again, _ = step(kept, X)
    assert same_bits(again.params, second.params)


def test_a_state_is_copied_but_not_pickled() -> None:
    step, state = one(tx.fuse(tx.mean("data"), tx.sgd(0.1, momentum=0.9)))
    for _ in range(2):  # before and after a step
        for save in (lambda: torch.save(state, io.BytesIO()), lambda: pickle.dumps({"state": state})):  # noqa: B023
            raises_text(TypeError, save, "fjoin.save(folder, step, state)")
        raises_text(TypeError, lambda: tx.to_state_dict(state), "the state is a TrainState", "state.pipeline")  # noqa: B023
        raises_text(TypeError, lambda: tx.to_state_dict({"a": state}), "at 'a' a TrainState")  # noqa: B023
        raises_text(TypeError, lambda: tx.from_state_dict(state, {}), "the state is a TrainState")  # noqa: B023
        kept, also = copy.deepcopy(state), copy.copy(state)
        before = state.clone().params
        state, _ = step(state, X)
        assert same_bits(kept.params, before) and same_bits(also.params, before)
        again, _ = step(kept, X)
        assert same_bits(again.params, state.params)
    saved = io.BytesIO()
    torch.save(tx.to_state_dict(state.pipeline), saved)
    saved.seek(0)
    assert same_bits(torch.load(saved, weights_only=True), tx.to_state_dict(state.pipeline))


def test_a_state_belongs_to_its_step() -> None:
    step, state = one(tx.fuse(tx.mean("data"), tx.sgd(0.1)))
    other, _ = one(tx.fuse(tx.mean("data"), tx.sgd(10.0)))
    raises_text(ValueError, lambda: other(state, X), "another train_step's init", "step.init(state.params)")
    moved, _ = other(other.init(state.params), X)
    assert not same_bits(moved.params, start()) and same_bits(state.params, start())


def test_without_donation_what_was_given_stays() -> None:
    params = start()
    step, first = step_of(quadratic, tx.fuse(tx.mean("data"), tx.adamw(0.1)), params, donate=False)
    second, _ = step(first, X)
    assert same_bits(first.params, start()) and not same_bits(second.params, start())
    again, _ = step(first, X)
    assert same_bits(again.params, second.params) and same_bits(again.pipeline.optimizer, second.pipeline.optimizer)
    assert same_bits(params, start()) and all(p.grad is None for p in params.values())


def test_backward_raises_if_a_step_overwrote_its_parameters() -> None:
    """A graph that still needs the old values must detect the in-place step."""
    step, state = one(tx.fuse(tx.mean("data"), tx.sgd(0.1)))
    w = state.params["w"].requires_grad_()
    other = (w * w).sum()
    step(state, X)
    raises_text(RuntimeError, lambda: other.backward(), "modified by an inplace operation")


def test_torn_state_raises() -> None:
    def explode(p: Any, s: Any, params: Any = None, **extra: Any) -> Any:
        raise ValueError("boom")

    pipeline = tx.fuse(tx.mean("data"), tx.sgd(0.1), after=tx.Transform(lambda p: (), explode))
    for donate in (True, False):
        step, state = one(pipeline, donate=donate)
        raises_text(ValueError, lambda: step(state, X), "boom")  # noqa: B023
        if donate:
            raises_text(fjoin.TornState, lambda: state.params, "step 0", "donate=False")  # noqa: B023
        else:
            assert same_bits(state.params, start())
    after = tx.outer_step(
        tx.Transform(lambda p: (), explode, facts=tx.Facts(reduces=tx.mean("data").facts.reduces)), tx.sgd(1.0), 2
    )
    step, state = one(tx.fuse(tx.identity(), tx.sgd(0.1), after=after))
    state, _ = step(state, X)
    raises_text(ValueError, lambda: step.flush(state), "boom")
    raises_text(fjoin.TornState, lambda: state.params, "step 1")


def test_a_failed_transform_of_buffers_leaves_the_state_before_the_step() -> None:
    """Its messages come before the optimizer's kernels."""
    fails = False

    def explode(buffers: Any, state: Any, params: Any = None) -> Any:
        if fails:
            raise ValueError("boom")
        return buffers, state

    on_buffers = tx.chain(tx.average_buffers("data"), tx.Transform(lambda p: (), explode))
    pipeline = tx.fuse(tx.mean("data"), tx.adamw(0.1))
    for accumulate in (1, 2):
        fails = False
        step = fjoin.train_step(
            lambda p, b, x: ((p["w"] * x).sum(), None, {"m": b["m"] + x}),
            pipeline,
            on_buffers=on_buffers,
            accumulate=accumulate,
        )
        state = step.init({"w": torch.ones(2)}, {"m": torch.zeros_like(X)})
        for _ in range(2 * accumulate - 1):
            state, _ = step(state, X)
        kept, fails = state.clone(), True
        raises_text(ValueError, lambda: step(state, X), "boom")  # noqa: B023
        assert state.step == 1 and same_bits(state.params, kept.params)
        assert same_bits(state.pipeline.optimizer, kept.pipeline.optimizer)
        assert same_bits(state.buffers, {"m": accumulate * X})


def freed_without_looking_for_cycles() -> list[bool]:
    gc.collect()
    gc.disable()
    try:
        mesh = fjoin.mesh({"x": 2, "y": 1})
        step = fjoin.train_step(lambda p, b: (p["w"] * b).sum(), tx.fuse(tx.mean("x"), tx.sgd(1.0)), mesh=mesh)
        state = step.init({"w": torch.zeros(2)})
        for batch in step.join([torch.ones(2)] * 2):
            state, metrics = step(state, batch)
        refs = [weakref.ref(mesh), weakref.ref(step), weakref.ref(step.run)]
        del mesh, step, state, metrics, batch
        return [ref() is None for ref in refs]
    finally:
        gc.enable()


def test_process_groups_go_with_the_step(pool: Any) -> None:
    """If they lived until the interpreter ends, gloo's threads could abort the process."""
    assert pool.run(2, freed_without_looking_for_cycles) == [[True] * 3] * 2


# -- going back to an earlier state: the steps after it leave nothing behind ---------------------------

LOCAL = tx.local_sgd(tx.sgd(0.1), tx.mean("data"), 4)  # whose records are read one step late


def gone_back(pipeline: tx.Pipeline, donate: bool, steps: int) -> Any:
    """The state after 5 steps, where `steps` others were taken from the second state first."""
    step, state = one(pipeline, donate=donate)
    state, _ = step(state, X)
    kept = state.clone() if donate else state
    stepped(step, state, [X * 3] * steps)
    state = stepped(step, kept, [X] * 4)
    return state.params, state.step


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("pipeline", [LOCAL, tx.fuse(tx.mean("data"), tx.sgd(0.1))], ids=["local", "mean"])
def test_a_step_goes_on_from_an_earlier_state(pipeline: tx.Pipeline, donate: bool) -> None:
    def one_rank() -> Any:
        return [gone_back(pipeline, donate, steps) for steps in range(4)]

    for (want, number), *others in tx.simulate(one_rank, {"data": 2}):
        assert number == 5 and all(same_bits(params, want) and steps == 5 for params, steps in others)


# -- a loss may return parameters in its aux and buffers, which the step must not overwrite --

ONE, ZERO = torch.ones(1), torch.zeros(1)


def distance(params: Any, batch: Any) -> torch.Tensor:
    return ((params["w"] - batch) ** 2).sum()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("donate", [True, False])
def test_buffers_are_copies_of_parameters_and_of_gradients(donate: bool, accumulate: int) -> None:
    """A copy of the parameters in every second step, kept in the others; and the gradients gathered so far in a window, to which
    the next call adds in place."""

    def loss_fn(params: Any, buffers: Any, batch: Any) -> Any:
        n = int(buffers["n"])
        target = params["w"].detach() if n // accumulate % 2 == 0 else buffers["target"]
        grad = params["w"].grad
        return distance(params, batch), None, {"target": target, "n": buffers["n"] + 1, "grad": ZERO if grad is None else grad}  # fmt: skip

    buffers = {"target": ZERO, "n": torch.tensor(0), "grad": ZERO}
    step, state = step_of(loss_fn, MEAN_SGD, {"w": ZERO}, buffers, donate=donate, accumulate=accumulate)
    look = lambda state, _: (state.buffers["target"].item(), state.buffers["grad"].item())  # noqa: E731
    seen = seen_by(look, step, state, [ONE] * 6 * accumulate)[accumulate - 1 :: accumulate]
    assert [target for target, _ in seen] == pytest.approx([0.0, 0.0, 0.36, 0.36, 0.5904, 0.5904])
    assert seen[-1][1] == pytest.approx(-2 * (1 - 0.67232) * (accumulate - 1))


@pytest.mark.parametrize("donate", [True, False])
def test_aux_views_of_parameters_are_copied(donate: bool) -> None:
    def loss_fn(params: Any, batch: Any) -> Any:
        w, other = params["w"], torch.ones(1)
        return distance(params, batch), {"own": other, "deep": [w, (w.detach().view(1, 1), {"plain": w[:1]})], "n": 3}

    step, state = step_of(loss_fn, params={"w": ZERO}, donate=donate)
    state, metrics = step(state, ONE)
    first, (second, third) = metrics.aux["deep"]
    assert [t.item() for t in (first, second, third["plain"])] == [0.0] * 3 and second.shape == (1, 1)
    assert state.params["w"].item() == pytest.approx(0.2)
    assert metrics.aux["n"] == 3 and not first.requires_grad


def test_aux_without_views_is_returned_unchanged() -> None:
    own = {"a": torch.ones(3), "b": [torch.zeros(1), "text"]}
    step, state = step_of(lambda p, b: (distance(p, b), own), params={"w": ZERO})
    _, metrics = step(state, ONE)
    assert metrics.aux is own


# -- other parameters in a state, by assignment and by `replace`, and those of a state in a module --

ONES = torch.ones(2)


def made(params: Any = None) -> Any:
    params = {"w": torch.ones(2), "v": torch.zeros(1)} if params is None else params
    return step_of(lambda p, b: sum((leaf * b).sum() for leaf in optree.tree_leaves(p)), params=params)


# -- an entry of state.params that is assigned is noticed, since no step looks at it -------------------

CHANGES: dict[str, Callable[[Any], Any]] = {
    "assign": lambda p: p.__setitem__("w", ONES), "assign what it was": lambda p: p.__setitem__("w", p["w"].clone()),
    "add": lambda p: p.__setitem__("new", ONES), "update": lambda p: p.update(w=ONES),
    "delete": lambda p: p.__delitem__("w"), "pop": lambda p: p.pop("w"), "clear": lambda p: p.clear(),
    "setdefault": lambda p: p.setdefault("new", ONES), "or": lambda p: p.__ior__({"w": ONES}),
}  # fmt: skip
USES: list[Callable[[Any, Any], Any]] = [
    lambda step, state: step(state, 1.0), lambda step, state: state.params, lambda step, state: state.clone(),
    lambda step, state: state.pipeline,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_next_use_raises_after_an_assignment(change: str) -> None:
    for use in USES:
        step, state = made()
        CHANGES[change](state.params)
        raises_text(TypeError, lambda: use(step, state), "state.params", "assigned or deleted", "copy_", "step.init(params)")  # noqa: B023  # fmt: skip
        assert state.params["w"].tolist() == [1.0, 1.0]  # raised only once
    step, state = made({"layers": [{"w": ONES}, {"w": ONES.clone()}], "head": (torch.ones(1),)})
    for nested in (lambda: state.params["layers"][1].update(w=ONES), lambda: state.params["layers"].pop()):
        nested()
        raises_text(TypeError, lambda: step(state, 1.0), "'layers.1.w'")


def test_state_params_is_a_plain_dict() -> None:
    step, state = made()
    params = state.params
    assert type(params) is type(copy.deepcopy(params)) is dict and params is not state.params
    state.params["w"].zero_()
    dict(state.params)["w"] = torch.ones(2)
    file = io.BytesIO()
    torch.save(state.params, file)
    file.seek(0)
    assert torch.equal(torch.load(file)["w"], torch.zeros(2))
    assert optree.tree_structure(state.params) == optree.tree_structure({**params, "w": torch.ones(2)})
    step(state, 1.0)  # none of this was an assignment


# -- replace -------------------------------------------------------------------------------------------

START = {"w": torch.linspace(-1, 1, 40).view(8, 5), "b": torch.ones(5)}
OTHER = {"w": torch.linspace(2, 3, 40).view(8, 5), "b": torch.zeros(5)}
PIPELINES: dict[str, Callable[[], tx.Pipeline]] = {
    "plain": lambda: tx.fuse(tx.mean("data"), tx.adamw(0.1)),
    "masters": lambda: tx.fuse(tx.mean("data"), tx.mixed_precision(tx.adamw(0.1))),
    "zero": lambda: tx.zero(tx.mean("data"), tx.adamw(0.1), "data"),
    "zero, masters, encoded": lambda: tx.zero(tx.mean("data"), tx.mixed_precision(tx.adamw(0.1)), "data", gather_codec=tx.int8()),
    "zero, encoded": lambda: tx.zero(tx.mean("data"), tx.adamw(0.1), "data", gather_codec=tx.int8()),
}  # fmt: skip


@pytest.mark.parametrize("name", PIPELINES)
def test_a_step_goes_on_from_other_parameters(name: str) -> None:
    dtype = torch.bfloat16 if "masters" in name else torch.float32

    def loss_fn(params: Any, x: Any) -> Any:
        return (x @ params["w"].float() + params["b"].float()).square().mean()

    def one_rank(rank: int) -> Any:
        step = fjoin.train_step(loss_fn, PIPELINES[name]())
        start, other = ({path: p.to(dtype) for path, p in tree.items()} for tree in (START, OTHER))
        state, _ = step(step.init(start), torch.ones(2, 8) * (rank + 1))
        state = state.replace(params=other)
        assert max_diff(state.params, other) == 0 and state.step == 1
        state, _ = step(state, torch.ones(2, 8))
        return {path: (p - other[path]).float().clone() for path, p in state.params.items()}

    a, b = tx.simulate(one_rank, {"data": 2}, [0, 1])
    for path, moved in a.items():
        assert torch.equal(moved, b[path]) and 0.01 < moved.abs().max() < 0.2, "it steps from the new values"


def test_buffers_and_bad_values() -> None:
    def with_buffers(params: Any, buffers: Any, x: Any) -> Any:
        return (params["w"] * x).sum(), None, {"count": buffers["count"] + 1}

    step, state = step_of(with_buffers, MEAN_SGD, {"w": torch.ones(3)}, {"count": torch.zeros(())}, accumulate=2)
    state, _ = step(state, torch.ones(3))
    raises_text(ValueError, lambda: state.replace(params={"w": torch.ones(3)}), "accumulation window")
    state, _ = step(state, torch.ones(3))
    state = state.replace(buffers={"count": torch.tensor(7.0)})
    assert state.buffers == {"count": 7.0}
    raises_text(ValueError, lambda: state.replace(params={"w": torch.ones(4)}), "(4,)", "expected", "(3,)")
    raises_text(ValueError, lambda: state.replace(params={}), "params", "expected")
    raises_text(ValueError, lambda: state.replace(buffers={"n": torch.zeros(())}), "buffers", "'n'", "'count'")


def test_views_of_the_own_parameters() -> None:
    _, state = made({"a": torch.zeros(2, 2), "b": torch.tensor([[1.0, 2.0], [3.0, 4.0]])})
    own = state.params
    state = state.replace(params={"a": own["b"].t(), "b": own["a"]})
    assert state.params["a"].tolist() == [[1.0, 3.0], [2.0, 4.0]] and not state.params["b"].any()
    raises_text(ValueError, lambda: state.replace(buffers={}), "has none")


# -- into a module -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:this forward pass has updated buffers")
def test_a_module_with_tied_weights_and_buffers() -> None:
    model = Tied()
    other = copy.deepcopy(model)
    apply, params, buffers = fjoin.functional(model)

    def loss(params: Any, buffers: Any, x: Any) -> Any:
        out, buffers = apply.with_buffers(params, buffers, x)
        return out.square().mean(), None, buffers

    step, state = step_of(loss, params=params, buffers=buffers)
    state = stepped(step, state, (torch.arange(4) + i % 2 for i in range(3)))
    assert fjoin.load_into(other, state) is other and other.head.weight is other.embed.weight
    other.eval()
    want = apply.eval()(state.params, state.buffers, TOKENS)
    assert torch.equal(other(TOKENS), want) and int(other.norm.num_batches_tracked) == 3
    assert not torch.equal(model.embed.weight, other.embed.weight), "the module that was taken stays as it is"
    assert not fjoin.load_into(other, {"head.weight": torch.zeros(5, 4)}).embed.weight.any(), "by its other name"


def test_values_that_do_not_fit_change_nothing() -> None:
    model = Tied()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    two = {"head.weight": torch.zeros(5, 4), "embed.weight": torch.ones(5, 4)}
    for values, *words in (
        ({"norm.weight": torch.zeros(4), "x": torch.zeros(1)}, "['x']"),
        ({"norm.weight": torch.zeros(5)}, "(5,)", "(4,)"), (two, "shares", "head.weight", "embed.weight"),
    ):  # fmt: skip
        raises_text(ValueError, lambda: fjoin.load_into(model, values), *words)  # noqa: B023
    raises_text(TypeError, lambda: fjoin.load_into({}, {}), "module")  # type: ignore[type-var]
    assert max_diff(dict(model.state_dict()), before) == 0


# -- modules inside wrappers of torch keep their names: in functional, load_into, saved objects and exports --


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


WRAPPERS: dict[str, Any] = {
    "torch.compile": compiled, "DDP": nn.parallel.DistributedDataParallel, "DataParallel": nn.DataParallel,
    "both": lambda module: compiled(nn.parallel.DistributedDataParallel(module)),
}  # fmt: skip


def same(a: Any, b: Any) -> bool:
    return list(a) == list(b) and all(torch.equal(a[path], b[path]) for path in a)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", WRAPPERS)
def test_names_are_those_inside(tmp_path: Path, name: str, inside: bool) -> None:
    """Of the whole module, or of one part of it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plain, module = net(), WRAPPERS[name](net())
        plain, module = (nn.Sequential(plain), nn.Sequential(module)) if inside else (plain, module)
        x, found = torch.randn(4, 3), []
        for one in (plain, module):
            apply, params, buffers = fjoin.functional(one)
            out, after = apply.with_buffers(params, buffers, x)
            found.append((params, buffers, {"out": out}, after))
        assert all(same(a, b) for a, b in zip(*found, strict=True))
        loss = lambda p, x: apply.eval()(p, buffers, x).square().mean()  # noqa: E731
        step = fjoin.train_step(loss, tx.fuse(tx.mean("data"), tx.sgd(0.1)))
        state, _ = step(step.init(params), x)
        for into in (module, plain):
            fjoin.load_into(into, state)
            assert same(dict(fjoin.functional(into)[1]), dict(state.params))
        if not inside:
            fjoin.save(tmp_path / "objects", {"model": module}, 1)
            other = net()
            assert fjoin.load(tmp_path / "objects", {"model": other}) == 1
            assert same(other.state_dict(), plain.state_dict())
    finally:
        dist.destroy_process_group()


def test_objects_saved_by_their_outer_names_are_loaded(tmp_path: Path) -> None:
    class Outer:
        def __init__(self, model: nn.Module) -> None:
            self.model = model

        def state_dict(self) -> dict[str, Any]:
            return {f"module._orig_mod.{path}": value for path, value in self.model.state_dict().items()}

        def load_state_dict(self, state: Any) -> None:
            raise NotImplementedError

    first, other = net(), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    fjoin.save(tmp_path / "old", {"model": Outer(first)}, 1)
    fjoin.load(tmp_path / "old", {"model": other})
    assert same(first.state_dict(), other.state_dict())
