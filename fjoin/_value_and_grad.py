"""Values and gradients by plain autograd, for training loops that need no transform of torch.func."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from ._taken import warn_of_module_params
from .transforms._check import flag
from .transforms.tree._tree import path_string


def value_and_grad(loss_fn: Callable[..., Any], has_aux: bool = False) -> Callable[..., tuple[Any, Any]]:
    """A function that returns the loss and its gradient by the first argument.

    It is jax.value_and_grad in plain autograd: faster than torch.func.grad_and_value, not to be used within torch.func.

    Args:
        loss_fn: `(params, *args, **kwargs) -> loss`, 0-d; or `-> (loss, aux)`. `params` is a pytree of tensors.
        has_aux: Whether it returns more than the loss.

    Returns:
        `(params, *args, **kwargs) -> (loss, grads)`, or `-> ((loss, aux), grads)`. `grads` is like `params`, zeros where
        the loss does not depend on a leaf; the loss and `aux` are without graph. No `.grad` is written.

    Raises:
        TypeError: raised by the call: a leaf that is no tensor of floating point or complex numbers; `loss_fn` returns no
            tensor, or no pair with `has_aux`.
        ValueError: raised by the call: the loss is not 0-d, or depends on no leaf.

    Same as: jax.value_and_grad.

    >>> import fjoin
    >>> loss, grads = fjoin.value_and_grad(lambda p, x: (p["w"] * x).sum())({"w": torch.ones(2)}, torch.tensor([3.0, 4.0]))
    >>> loss, grads
    (tensor(7.), {'w': tensor([3., 4.])})
    """
    if not callable(loss_fn):
        raise TypeError(f"value_and_grad: loss_fn must be a function, got {loss_fn!r}")
    flag("has_aux", has_aux)

    known = False  # whether a loss has been searched for parameters of a module

    def of(params: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        leaves, structure = optree.tree_flatten(params)
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
                got = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
                name = path_string(optree.treespec_paths(structure)[i])
                raise TypeError(
                    f"value_and_grad: params[{name!r}] is {got}, expected a tensor of floating point numbers"
                )
        with torch.enable_grad():
            own = [leaf.detach().requires_grad_() for leaf in leaves]
            out = loss_fn(optree.tree_unflatten(structure, own), *args, **kwargs)
        if has_aux and not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(f"value_and_grad: with has_aux loss_fn must return (loss, aux), got {type(out).__name__}")
        loss, aux = out if has_aux else (out, None)
        if not isinstance(loss, Tensor):
            raise TypeError(f"value_and_grad: loss_fn must return a tensor, got {type(loss).__name__}")
        if loss.dim():
            raise ValueError(
                f"value_and_grad: the loss has shape {tuple(loss.shape)}, expected (); take its mean or its sum"
            )
        if leaves and not loss.requires_grad:
            raise ValueError("value_and_grad: the loss depends on no leaf of params")
        nonlocal known
        if not known:
            warn_of_module_params(loss, stacklevel=3)
            known = True
        grads = torch.autograd.grad(loss, own, allow_unused=True, materialize_grads=True) if leaves else ()
        value: Any = loss.detach()
        if has_aux:
            held: Any = aux
            value = value, optree.tree_map(_without_graph, held)
        return value, optree.tree_unflatten(structure, grads)

    return functools.update_wrapper(
        of, loss_fn, functools.WRAPPER_ASSIGNMENTS if hasattr(loss_fn, "__name__") else (), ()
    )


def _without_graph(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x
