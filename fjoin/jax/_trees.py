"""Trees of jax's arrays and of torch's tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor

from ..transforms.base import trees

try:
    jax: Any = importlib.import_module("jax")
    importlib.import_module("jax.dlpack")
except ImportError:
    raise ImportError("fjoin.jax needs jax: pip install 'fjoin[jax]'; for optax: pip install 'fjoin[optax]'") from None

# A leaf of this many elements is passed to jax alone. That takes about 60 us; joining leaves takes a copy each way.
_ALONE = 2**16


class Layout:
    """The position of each leaf in the flat arrays: one array for all small leaves of a dtype, one for each large leaf.

    Attributes:
        sizes: The arrays: (dtype, the large leaf's index or -1) -> elements.
        places: Of each leaf its array, its place in it, its number of elements, and its shape.
    """

    def __init__(self, leaves: Iterable[tuple[Any, Any]]) -> None:
        self.sizes: dict[tuple[Any, int], int] = {}
        self.places = []
        for i, (shape, dtype) in enumerate(leaves):
            numel = int(np.prod(shape))
            key = (dtype, i if numel >= _ALONE else -1)
            at = self.sizes.setdefault(key, 0)
            self.places.append((key, at, numel, tuple(shape)))
            self.sizes[key] = at + numel

    def cut(self, flats: Any) -> list[Any]:
        of = dict(zip(self.sizes, flats, strict=True))
        return [of[key][at : at + numel].reshape(shape) for key, at, numel, shape in self.places]

    def join(self, leaves: list[Any], concatenate: Callable[[list[Any]], Any]) -> tuple[Any, ...]:
        parts: dict[Any, list[Any]] = {key: [] for key in self.sizes}
        for (key, *_), leaf in zip(self.places, leaves, strict=True):
            parts[key].append(leaf.reshape(-1))
        return tuple(some[0] if len(some) == 1 else concatenate(some) for some in parts.values())


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype in jax."""
    return str(dtype).removeprefix("torch.")


def to_array(flat: Tensor) -> Any:
    """A tensor as an array of jax: a view of its memory where that is aligned to 64 bytes, else a copy."""
    if not flat.numel():
        return jax.numpy.zeros((0,), name_of(flat.dtype))
    return jax.dlpack.from_dlpack(flat.contiguous().resolve_conj().resolve_neg())  # whose memory holds the values


def to_tensor(array: Any) -> Tensor:
    """An array of jax as a tensor: a view of its memory."""
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        raise TypeError("a random key is no tensor; pass jax.random.key_data(key), or loss(f, seed=...)")
    if not array.size:
        return torch.zeros(array.shape, dtype=getattr(torch, str(array.dtype)))
    return torch.from_dlpack(array)  # type: ignore[attr-defined]


def adopt(tree: Any) -> None:
    """Make optree see into classes that only jax knows as nodes, such as equinox's modules, with the same names."""
    while True:
        leaves = optree.tree_leaves(tree)
        classes = {type(x) for x in leaves if not isinstance(x, (Tensor, jax.Array))}
        found = {type(x) for x in leaves if type(x) in classes and not jax.tree_util.all_leaves([x])}
        if not found:
            return
        for one in found:
            optree.register_pytree_node(
                one, _children, jax.tree_util.tree_unflatten, namespace=optree.registry.__GLOBAL_NAMESPACE
            )


def _children(node: Any) -> tuple[list[Any], Any, list[Any]]:
    pairs, structure = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    return [child for _, child in pairs], structure, [_name(key[0]) for key, _ in pairs]


def _name(key: Any) -> Any:
    return next((getattr(key, field) for field in ("key", "idx", "name") if hasattr(key, field)), str(key))


def to_torch(tree: Any) -> Any:
    """A tree with tensors in the place of jax's arrays, in memory of their own.

    Args:
        tree: A pytree of jax, of dicts, tuples, or classes such as equinox's modules. Leaves that are no arrays stay.

    Raises:
        TypeError: an array of a dtype that torch lacks.

    >>> import fjoin.jax
    >>> import jax.numpy as jnp
    >>> fjoin.jax.to_torch({"w": jnp.arange(2.0)})
    {'w': tensor([0., 1.])}
    """
    adopt(tree)
    return optree.tree_map(lambda x: to_tensor(x).clone() if isinstance(x, jax.Array) else x, tree)


def to_jax(tree: Any) -> Any:
    """A tree with jax's arrays in the place of tensors, in memory of their own: for evaluation and for files of jax's.

    Args:
        tree: Such as `state.params`.

    Raises:
        ValueError: a tensor of 64 bits, which jax would narrow without `jax.enable_x64(True)`.

    >>> import fjoin.jax
    >>> fjoin.jax.to_jax({"w": torch.ones(2)})
    {'w': Array([1., 1.], dtype=float32)}
    """
    adopt(tree)
    return optree.tree_map(lambda x: _array(x) if isinstance(x, Tensor) else x, tree)


def _array(x: Tensor) -> Any:
    if str(jax.dtypes.canonicalize_dtype(name_of(x.dtype))) != name_of(x.dtype):
        raise ValueError(f"jax would narrow a tensor of {x.dtype}; call to_jax within `with jax.enable_x64(True):`")
    return to_array(x.detach()).reshape(x.shape).copy()


def flat(tree: Any) -> dict[str, Tensor]:
    """Path -> tensor, for the buffers of `step.init`, from nested dicts such as flax's `batch_stats`.

    Raises:
        ValueError: a name has a dot in it.

    >>> import fjoin.jax
    >>> import jax.numpy as jnp
    >>> fjoin.jax.flat({"BatchNorm_0": {"mean": jnp.zeros(2)}})
    {'BatchNorm_0.mean': tensor([0., 0.])}
    """
    paths, leaves, _ = optree.tree_flatten_with_path(to_torch(tree))
    if dotted := [path for path in paths if any("." in str(name) for name in path)]:
        raise ValueError(f"names of buffers must have no dots, got {dotted[0]}")
    return {trees.path_string(path): leaf for path, leaf in zip(paths, leaves, strict=True)}


def nested(buffers: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts from paths; the inverse of `flat`, with the leaves as they are.

    >>> import fjoin.jax
    >>> fjoin.jax.nested({"BatchNorm_0.mean": 1, "BatchNorm_0.var": 2})
    {'BatchNorm_0': {'mean': 1, 'var': 2}}
    """
    out: dict[str, Any] = {}
    for path, leaf in buffers.items():
        *outer, name = path.split(".")
        at = out
        for key in outer:
            at = at.setdefault(key, {})
        at[name] = leaf
    return out
