"""Other parameters in a state, by assignment and by `replace`, and those of a state in a module."""

from __future__ import annotations

import copy
import io
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
from tests.helpers import max_diff, raises_text, stepped
from tests.training.small import MEAN_SGD, step_of
from tests.training.test_functional import TOKENS, Tied

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
