"""The laws of optimizers.

Each law is a function whose argument makes an optimizer. It raises AssertionError where the law is broken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import transforms as tx
from ._compare import max_diff, params_like, repeated, same_bits, saved_and_loaded, snapshot


def _grads(seed: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(3, 4, generator=g, dtype=torch.float64) for _ in range(5)]


def _begun(make: Callable[[], tx.Optimizer]) -> tuple[tx.Optimizer, Tensor, Any]:
    """The optimizer of one parameter, the parameter, and its state."""
    part, param = make().at("layer.weight"), params_like()["layer.weight"]
    return part, param, part.init_param(param)


def step_param_is_pure(make: Callable[[], tx.Optimizer]) -> None:
    """A repeated call gives the same result, and its arguments stay unchanged."""
    part, param, state = _begun(make)
    for grad in _grads(1):
        param, state = repeated(part.step_param, param, grad, state)


def in_place_agrees(make: Callable[[], tx.Optimizer]) -> None:
    """step_param_ does in place what step_param returns, with and without grad_scale."""
    for scale in (None, torch.tensor(4.0, dtype=torch.float64)):
        part, param, state = _begun(make)
        _, own, slots = _begun(make)
        for grad in _grads(2):
            param, state = part.step_param(param, grad, state)
            given = grad.clone() if scale is None else grad * scale
            part.step_param_(own, given, slots, grad_scale=scale)
        assert max_diff((own, slots), (param, state)) < 1e-14


def found_inf_stops_it(make: Callable[[], tx.Optimizer]) -> None:
    """With found_inf 1 nothing changes; with 0 the step is taken."""
    part, own, slots = _begun(make)
    for found, grad in zip((0.0, 1.0, 0.0), _grads(3), strict=False):
        before = snapshot((own, slots))[0]
        part.step_param_(own, grad.clone(), slots, found_inf=torch.tensor(found))
        stays = same_bits((own, slots), before)
        assert stays == (found == 1.0), (
            f"with found_inf {found} parameter and state, with its step, are {'as before' if stays else 'changed'}"
        )


def tree_step_agrees(make: Callable[[], tx.Optimizer]) -> None:
    """The step of a tree is the step of each leaf, and its arguments stay unchanged."""
    opt, params = make(), params_like()
    state = opt.init(params)
    own = {path: (p, opt.at(path).init_param(p)) for path, p in params.items()}
    for step in range(3):
        grads = params_like(100 + step)
        new = repeated(opt.step, params, grads, state)
        own = {path: opt.at(path).step_param(p, grads[path], s) for path, (p, s) in own.items()}
        params, state = new
        assert max_diff(params, {path: p for path, (p, _) in own.items()}) < 1e-14
        assert max_diff(state, {path: s for path, (_, s) in own.items()}) < 1e-14


def flat_is_leaves(make: Callable[[], tx.Optimizer]) -> None:
    """elementwise: the step of a flat buffer is the step of its parts."""
    part, param, state = _begun(make)
    if not part.elementwise:
        return
    rows = [(row, part.init_param(row)) for row in param]
    for grad in _grads(4):
        param, state = part.step_param(param, grad, state)
        rows = [part.step_param(p, g, s) for (p, s), g in zip(rows, grad, strict=True)]
    assert max_diff(param, torch.stack([p for p, _ in rows])) == 0


def resumes(make: Callable[[], tx.Optimizer]) -> None:
    """Saved to a file and loaded again, the state gives the same next step to the bit."""
    opt, start = make(), params_like()
    params, state = opt.step(start, params_like(100), opt.init(start))
    loaded = saved_and_loaded(state, like=opt.init(start))
    assert same_bits(opt.step(params, params_like(101), state), opt.step(params, params_like(101), loaded))
