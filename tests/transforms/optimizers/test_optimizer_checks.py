"""Gradients and states that do not belong to a parameter are refused before anything changes; gaps in memory are served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

from fjoin import transforms as tx
from tests.helpers import max_diff, raises_text, same_bits
from tests.optimizer_table import OPTIMIZERS

ROWS = [(f"{name}{i}", make) for name, rows in OPTIMIZERS.items() for i, make in enumerate(rows)]
MATRICES = {"w.weight": torch.ones(4, 6)}


def at(make: Callable[[], tx.Optimizer]) -> tx.Optimizer:
    return make().at("w.weight")


def changed(state: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A state whose first tensor that is not 0-d is another one; where there is none, the count."""
    leaves, structure = optree.tree_flatten(state)
    at = next((i for i, leaf in enumerate(leaves) if leaf.dim()), 0)
    leaves[at] = change(leaves[at])
    return optree.tree_unflatten(structure, leaves)


OTHERS: dict[str, tuple[type[Exception], Callable[[Tensor], Tensor], str]] = {
    "shape": (ValueError, lambda t: t.new_zeros((1, 1, 1)), "shape"),
    "shorter": (ValueError, lambda t: t[::2] if t.dim() else t.view(1), "shape"),
    "dtype": (TypeError, lambda t: t.to(torch.int16), "int16"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize(("name", "make"), ROWS, ids=[name for name, _ in ROWS])
def test_a_state_of_another_form_is_refused(name: str, make: Callable[[], tx.Optimizer], other: str) -> None:
    kind, change, text = OTHERS[other]
    opt, part = make(), at(make)
    params = {path: p.clone() for path, p in MATRICES.items()}
    if name.startswith(("partition", "muon", "mixed_precision1", "inject_hyperparameters2")):
        params["b"] = torch.ones(3)  # for the patterns to match
    grads = {path: torch.ones_like(p) for path, p in params.items()}
    state = opt.init(params)
    wrong = {**state, "w.weight": changed(state["w.weight"], change)}
    raises_text(kind, lambda: opt.step(params, grads, wrong), "state['w.weight'].", text)
    p, g = params["w.weight"].clone(), grads["w.weight"]
    raises_text(kind, lambda: part.step_param_(p, g, wrong["w.weight"]), "state.", text)
    if part.step_params_ is not None:
        raises_text(kind, lambda: part.step_params_([p], [g], [wrong["w.weight"]]), "state.", text)
    assert same_bits(p, params["w.weight"])
    pipeline = tx.fuse(tx.identity(), opt)
    full = pipeline.init(params)._replace(optimizer=wrong)
    raises_text(kind, lambda: pipeline.step(params, grads, full), "state['w.weight'].", text)


@pytest.mark.parametrize(("name", "make"), ROWS, ids=[name for name, _ in ROWS])
def test_a_gradient_of_another_form_is_refused(name: str, make: Callable[[], tx.Optimizer]) -> None:
    part, p = at(make), MATRICES["w.weight"].clone()
    state = part.init_param(p)
    before = optree.tree_map(torch.clone, state)
    given: list[tuple[type[Exception], Any, str]] = [
        (ValueError, torch.ones(6, 4), "(6, 4)"), (ValueError, torch.ones(1), "(1,)"),
        (TypeError, torch.ones(4, 6).double(), "float64"), (ValueError, torch.ones(4, 6, device="meta"), "meta"),
        (TypeError, torch.ones(4, 6).to_sparse(), "sparse"), (TypeError, None, "None"),
    ]  # fmt: skip
    for kind, grad, text in given:
        raises_text(kind, lambda grad=grad: part.step_param_(p, grad, state), "grad", text)
    assert same_bits(p, MATRICES["w.weight"]) and same_bits(state, before)


GAPS: dict[str, Callable[[], Tensor]] = {
    "column": lambda: torch.ones(8, 2, dtype=torch.float64)[:, 0],
    "every second": lambda: torch.ones(4, 12, dtype=torch.float64)[:, ::2],
    "turned": lambda: torch.ones(6, 4, dtype=torch.float64).t(),
    "turned with gaps": lambda: torch.ones(6, 8, dtype=torch.float64)[:, ::2].t(),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize(("name", "make"), ROWS, ids=[name for name, _ in ROWS])
def test_tensors_with_gaps_in_memory_are_supported(name: str, make: Callable[[], tx.Optimizer], gap: str) -> None:
    """Parameters, gradients and states may have gaps: results match contiguous tensors, and the gaps do not change."""
    part, p = at(make), GAPS[gap]()
    if p.dim() < 2 and "muon" in repr(part):
        pytest.skip("muon takes matrices only")
    strided = lambda x: torch.stack([x, x], -1)[..., 0] if x.dim() else x  # noqa: E731
    want = p.clone(memory_format=torch.contiguous_format)
    state, own = part.init_param(want), optree.tree_map(strided, part.init_param(p))
    for i in range(3):
        grad = torch.sin(torch.arange(p.numel(), dtype=torch.float64) + i).view(p.shape)
        part.step_param_(want, grad.clone(), state, grad_scale=torch.tensor(2.0, dtype=torch.float64))
        part.step_param_(p, strided(grad), own, grad_scale=torch.tensor(2.0, dtype=torch.float64))
    assert max_diff(p, want) < 1e-14 and max_diff(own, state) < 1e-14
    if part.elementwise:  # a step of the tree lays gradients out, expanded ones too
        for grad in (strided(p), torch.ones((), dtype=p.dtype).expand(p.shape)):
            steps = [
                part.step({"w": x}, {"w": g}, part.init({"w": x})) for x, g in ((p, grad), (want, grad.contiguous()))
            ]
            assert max_diff(*steps) < 1e-14
    base = p._base
    assert base is not None and int((base != 1).sum()) == (0 if "frozen" in repr(part) else p.numel())


def test_a_kernel_of_one_parameter_counts_the_steps_of_each() -> None:
    whole = tx.sgd(0.1, momentum=0.9)
    alone = tx.Optimizer(whole.init_param, whole.step_param, lambda p, g, s: whole.step_param_(p, g, s))
    found = []
    for opt in (whole, alone, tx.mixed_precision(alone)):
        pipeline, params = tx.fuse(tx.identity(), opt), {"v": torch.ones(3), "w": torch.ones(2, 2)}
        state = pipeline.init(params)
        for _ in range(3):
            grads = {path: p * 2 for path, p in params.items()}
            params, state = pipeline.step(params, grads, state, donate=True)
        assert {float(own.step) for own in state.optimizer.values()} == {3.0}
        found.append(params)
    assert same_bits(found[0], found[1]) and same_bits(found[0], found[2])


@pytest.mark.parametrize("make", [tx.sgd, tx.adamw, tx.rmsprop, lambda: tx.mixed_precision(tx.adam())])
def test_states_of_one_kernel_share_their_step_count(make: Callable[[], tx.Optimizer]) -> None:
    opt, p, q = make(), torch.ones(3), torch.ones(())
    shared = list(opt.init([p, q]))
    assert opt.step_params_ is not None
    opt.step_params_([p, q], [torch.ones(3), torch.ones(())], shared)
    assert {float(state.step) for state in shared} == {1.0}
    opt.step_params_([], [], [])
    alone = [opt.init_param(x) for x in (p, q)]
    raises_text(ValueError, lambda: opt.step_params_([p, q], [p, q], alone), "states[1]", "states[0]", "init(params)")


@pytest.mark.parametrize(("name", "make"), ROWS, ids=[name for name, _ in ROWS])
def test_a_step_in_place_is_not_recorded_and_a_graph_notices_it(name: str, make: Callable[[], tx.Optimizer]) -> None:
    """As a step of torch.optim."""
    part, leaf, want = at(make), MATRICES["w.weight"].clone().requires_grad_(), MATRICES["w.weight"].clone()
    for kernel in kernels(part):
        grad = torch.ones_like(leaf, requires_grad=True)
        kernel(want, grad, part.init_param(want))
        loss = (leaf * leaf).sum()
        kernel(leaf, grad, part.init_param(leaf.detach()))
        assert leaf.is_leaf and same_bits(leaf.detach(), want)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def kernels(part: tx.Optimizer) -> list[Callable[..., None]]:
    """The functions that step one parameter in place: alone, and as the only one in lists."""
    many = part.step_params_
    if many is None:
        return [part.step_param_]
    return [part.step_param_, lambda p, g, s, **guards: many([p], [g], [s], **guards)]
