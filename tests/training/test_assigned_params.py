"""An entry of state.params that is assigned is noticed, since no step looks at it."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch

import fjoin
from fjoin import transforms as tx
from tests.helpers import raises_text


def made(params: Any = None) -> Any:
    params = {"w": torch.ones(2), "v": torch.zeros(1)} if params is None else params
    step = fjoin.train_step(
        lambda p, b: sum((leaf * b).sum() for leaf in optree.tree_leaves(p)), tx.fuse(tx.mean("data"), tx.sgd(0.5))
    )
    return step, step.init(params)


def _delete(params: Any) -> None:
    del params["w"]


def _or(params: Any) -> None:
    params |= {"w": torch.zeros(2)}


CHANGES: dict[str, Callable[[Any], Any]] = {
    "assign": lambda p: p.__setitem__("w", torch.zeros(2)),
    "assign what it was": lambda p: p.__setitem__("w", p["w"].clone()),
    "add": lambda p: p.__setitem__("new", torch.zeros(2)), "update": lambda p: p.update(w=torch.zeros(2)),
    "delete": _delete, "pop": lambda p: p.pop("w"), "clear": lambda p: p.clear(),
    "setdefault": lambda p: p.setdefault("new", torch.zeros(2)), "or": _or,
}  # fmt: skip
USES: dict[str, Callable[[Any, Any], Any]] = {
    "step": lambda step, state: step(state, 1.0), "params": lambda step, state: state.params,
    "clone": lambda step, state: state.clone(), "pipeline": lambda step, state: state.pipeline,
}  # fmt: skip


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("change", CHANGES)
def test_next_use_raises_after_an_assignment(change: str, use: str) -> None:
    step, state = made()
    CHANGES[change](state.params)
    raises_text(TypeError, lambda: USES[use](step, state), "state.params", "assigned or deleted", "copy_", "step.init(params)")  # fmt: skip
    assert state.params["w"].tolist() == [1.0, 1.0]  # raised only once


def test_nested_assignments_raise() -> None:
    params = {"layers": [{"w": torch.ones(2)}, {"w": torch.ones(2)}], "head": (torch.ones(1),)}
    step, state = made(params)
    state.params["layers"][1]["w"] = torch.zeros(2)
    raises_text(TypeError, lambda: step(state, 1.0), "'layers.1.w'")
    state.params["layers"].pop()
    raises_text(TypeError, lambda: step(state, 1.0), "'layers.1.w'")


def test_state_params_is_a_plain_dict() -> None:
    step, state = made()
    params = state.params
    assert type(params) is dict and params is not state.params
    changed = {**params, "w": torch.zeros(2)}
    changed["v"] = torch.ones(1)
    state.params["w"].zero_()
    other = dict(state.params)
    other["w"] = torch.ones(2)
    assert type(copy.deepcopy(state.params)) is dict
    file = io.BytesIO()
    torch.save(state.params, file)
    file.seek(0)
    assert torch.equal(torch.load(file)["w"], torch.zeros(2))
    assert optree.tree_structure(state.params) == optree.tree_structure(changed)
    linear = torch.nn.Linear(2, 1)
    apply, params, _ = fjoin.functional(linear)
    step, state = made(params)
    linear.load_state_dict(state.params)
    torch.func.functional_call(linear, state.params, (torch.ones(1, 2),))
    state, _ = step(state, 1.0)
    assert torch.equal(state.params["bias"], params["bias"] - 0.5)
