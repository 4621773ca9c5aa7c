"""Helpers that many tests share."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fjoin
from fjoin import transforms as tx
from fjoin.testing._compare import (
    assert_untouched as assert_untouched,
    max_diff as max_diff,
    params_like as params_like,
    same_bits as same_bits,
    snapshot as snapshot,
)


def raises_text(kind: type[BaseException], function: Callable[[], object], *parts: str) -> str:
    """The text of the error that `function` must raise, which must contain the parts."""
    try:
        function()
    except kind as error:
        text = str(error)
        for part in parts:
            assert part in text, f"{part!r} not in {text!r}"
        return text
    raise AssertionError(f"expected a {kind.__name__}, nothing was raised")


def loaded(path: Path | str, name: str) -> Any:
    """A file as a module of this name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def warned(call: Callable[[], Any], file: str = "") -> list[str]:
    """The texts of all warnings, which must name a line of the file."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    assert not file or all(warning.filename == file for warning in seen)
    return [str(warning.message) for warning in seen]


def or_text(function: Callable[[], Any]) -> Any:
    """What the function returns, or the type and the text of its error: of fjoin's, or of bad values."""
    try:
        return function()
    except (fjoin.FjoinError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def stepped(step: Any, state: Any, batches: Iterable[Any]) -> Any:
    """The state after a step on each of the batches."""
    for batch in batches:
        state, _ = step(state, batch)
    return state


def judged(step: Any, on_device: Any) -> Any:
    """The step, whose gradients the device judges in place of the host."""
    step.run.step_check.grads.on_device = on_device
    return step


def seen_by(look: Callable[[Any, Any], Any], step: Any, state: Any, batches: Iterable[Any]) -> list[Any]:
    """`look(state, metrics)` after a step on each of the batches."""
    seen = []
    for batch in batches:
        state, metrics = step(state, batch)
        seen.append(look(state, metrics))
    return seen


def by_hand(
    function: Callable[[Any, Any], Any],
    needs: tx.Needs = tx.Needs.NOTHING,
    init: Callable[[Any], Any] = lambda params: (),
) -> tx.Transform:
    """A transform of `function(values, state)`, which gives both anew."""
    return tx.Transform(init, lambda g, state, params=None, **extra: function(g, state), needs=needs)


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, action: Callable[[], None]) -> Tensor:
        ctx.action = action
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ctx.action()
        return grad, None


def in_backward(x: Tensor, action: Callable[[], None]) -> Tensor:
    """x, as it is; `action` is called when its gradient has come."""
    out: Tensor = _InBackward.apply(x, action)
    return out
