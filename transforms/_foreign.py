"""What to write where an object of jax, optax or equinox was given. None of them is imported."""

from __future__ import annotations

from typing import Any

import optree
from torch import nn

TO_TORCH = "; fjoin.jax.to_torch(tree) makes tensors of arrays of jax"
# In the place of an optimizer or of a pipeline.
PIPELINE_OF_OPTAX = (
    "write tx.fuse(tx.chain(tx.mean('data'), tx.from_optax(transformation)), tx.sgd(1.0, maximize=True)), which adds "
    "optax's updates"
)
OF_FLAX = "; of a module of flax pass the arrays, fjoin.jax.to_torch(module.init(key, x)['params']), and call fjoin.jax.loss(f)"
LOSS_OF_JAX = "a loss that jax computes is fjoin.jax.loss(loss_fn)"
# Its leaves are arrays and functions.
OF_EQUINOX = (
    "; of a model of equinox pass the arrays, fjoin.jax.to_torch(eqx.partition(model, eqx.is_inexact_array)[0]), and combine "
    "them with the rest in fjoin.jax.loss(f)"
)


def is_optax(value: Any) -> bool:
    """Whether a value is a transformation of optax."""
    return type(value).__name__.startswith("GradientTransformation")


def is_jax(value: Any) -> bool:
    """Whether a value is an array of jax."""
    return type(value).__module__.split(".")[0] in ("jax", "jaxlib") and hasattr(value, "dtype")


def remedy(value: Any, number: bool = False) -> str:
    """What to write in the place of a value, behind the text of an error; empty if it is none of jax's, optax's or equinox's.

    Args:
        number: Whether a number was expected, else a tensor.

    >>> remedy(3.0)
    ''
    """
    if is_optax(value):
        return f"; {PIPELINE_OF_OPTAX}"
    if is_jax(value):
        return "; float(array) makes a number of it" if number else TO_TORCH
    homes = {base.__module__.split(".")[0] for base in type(value).__mro__}
    return OF_EQUINOX if "equinox" in homes else OF_FLAX if "flax" in homes else ""


def of_leaf(leaf: Any) -> str:
    """What to write in the place of a leaf of parameters; functions among them are those of a model of equinox."""
    return remedy(leaf) or (OF_EQUINOX if callable(leaf) and not isinstance(leaf, nn.Module) else "")


def note_jax(error: BaseException, given: Any) -> None:
    """Add to an error of a loss what to write, if it was given arrays of jax, or if jax was given tensors.

    Args:
        given: The arguments of the loss, behind the parameters.
    """
    if any(map(is_jax, optree.tree_leaves(given))):
        error.add_note(f"The batch holds arrays of jax{TO_TORCH}, and {LOSS_OF_JAX}.")
    elif "abstract array" in str(error) or "JAX" in str(error):
        error.add_note(f"The loss gives tensors to jax; {LOSS_OF_JAX}.")
