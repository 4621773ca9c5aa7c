"""These transforms in optax."""

from __future__ import annotations

from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor

from .._jax_arrays import import_jax
from ..transform._transform import Transform, check_transform
from ..tree._tree import State


def to_optax(transform: Transform) -> Any:
    """A transform without collectives as an optax transformation, eagerly or under jax.jit.

    Args:
        transform: A `Transform`. jax calls it from a thread of its own, where no axis is bound, so it must not
            communicate.

    Returns:
        An `optax.GradientTransformation`, whose state is a list of arrays.

    Raises:
        ImportError: jax or optax is not installed.
        TypeError: `transform` is no Transform.

    >>> import jax.numpy as jnp
    >>> from fjoin import transforms as tx
    >>> clip = to_optax(tx.clip_by_value(1.0))
    >>> grads = {"a": jnp.array([3.0, 0.5])}
    >>> clip.update(grads, clip.init(grads))[0]["a"].tolist()
    [1.0, 0.5]
    """
    check_transform(transform, "to_optax")
    jax = import_jax()
    import optax  # type: ignore[import-untyped]

    def arrays(state: State) -> list[Any]:
        """The leaves of a state as numpy arrays, of dtypes that jax supports in its present mode."""
        arrays = [np.asarray(leaf) for leaf in optree.tree_leaves(state)]
        return [array.astype(jax.dtypes.canonicalize_dtype(array.dtype)) for array in arrays]

    def begin(params: Any) -> State:
        return transform.init(jax.tree.map(_from_numpy, params))

    def init(params: Any) -> Any:
        form = jax.tree.map(_like, arrays(begin(jax.tree.map(lambda p: np.zeros(p.shape, p.dtype), params))))
        return jax.pure_callback(lambda given: arrays(begin(jax.tree.map(np.asarray, given))), form, params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def call(grads: Any, leaves: Any, given: Any) -> tuple[Any, Any]:
            grads, given = (jax.tree.map(lambda x: _from_numpy(np.asarray(x)), tree) for tree in (grads, given))
            first = transform.init(grads)
            kinds = optree.tree_leaves(first)
            # Host integers and flags decide which code runs, so they are converted back to their types.
            held = [
                _from_numpy(np.asarray(leaf)).to(kind.dtype)
                if isinstance(kind, Tensor)
                else type(kind)(np.asarray(leaf))
                for leaf, kind in zip(leaves, kinds, strict=True)
            ]
            old = optree.tree_unflatten(optree.tree_structure(first), held)
            new, after = transform.update(grads, old, given)
            return jax.tree.map(lambda t: t.numpy(), new), arrays(after)

        form = jax.tree.map(_like, (updates, state))
        return jax.pure_callback(call, form, updates, state, params)  # type: ignore[no-any-return]

    return optax.GradientTransformation(init, update)


def _from_numpy(array: Any) -> Tensor:
    if array.dtype.kind == "V":
        raise TypeError(f"to_optax cannot hand a jax array of {array.dtype.name} to torch; cast it to float32")
    return torch.from_numpy(np.array(array))  # a copy: jax's arrays are read-only


def _like(array: Any) -> Any:
    return import_jax().ShapeDtypeStruct(array.shape, array.dtype)
