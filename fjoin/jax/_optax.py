"""Transformations of optax as transforms, and the reverse."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import optree
import torch
from torch import Tensor

from ..transforms.base import Needs, State, Transform, Tree, check_transform, factory, trees
from ._trees import Layout, jax, name_of, to_array, to_tensor


class OptaxState(NamedTuple):
    flats: tuple[Tensor, ...]  # the leaves of optax's state; small leaves of one dtype share a flat tensor


@factory
def from_optax(transformation: Any, per_leaf: bool = False) -> Transform:
    """An optax transformation as a stage, if it needs only gradients and parameters.

    jax compiles it for the given tree. Tensors are passed to jax and back by DLPack: large ones without a copy where
    their memory is aligned, all small ones of a dtype as one flat tensor, which jax splits into leaves.

    An optax optimizer returns updates to be added to the parameters. `sgd(1.0, maximize=True)` adds them:
    `fuse(chain(mean("data"), from_optax(optax.adamw(1e-3))), sgd(1.0, maximize=True))`.

    Args:
        transformation: An `optax.GradientTransformation`; with `fuse`, it gets the parameters too.
        per_leaf: Whether it treats each leaf by itself, so it may be called on some of the leaves.

    Returns:
        A `Transform`. State: `OptaxState(flats)`.

    Raises:
        TypeError: `transformation` is no pair of `init` and `update`.
        RuntimeError: at `update`: something differentiates through gradients or parameters.

    Same as: optax, with torch's tensors.

    >>> import fjoin.jax
    >>> import optax
    >>> clip = fjoin.jax.from_optax(optax.clip(1.0))
    >>> grads = {"a": torch.tensor([3.0, 0.5]), "b": torch.tensor(-2.0)}
    >>> clip.update(grads, clip.init(grads), grads)[0]
    {'a': tensor([1.0000, 0.5000]), 'b': tensor(-1.)}
    """
    if not (isinstance(transformation, tuple) and len(transformation) == 2 and all(map(callable, transformation))):
        raise TypeError(f"from_optax takes an optax.GradientTransformation, got {transformation!r}")

    @functools.lru_cache(maxsize=16)
    def compiled(shapes: _Shapes) -> _CompiledUpdate:
        return _CompiledUpdate(*transformation, shapes)

    def init(params: Tree) -> OptaxState:
        run = compiled(_Shapes.of(params))
        if trees.has_no_data(params):  # jax would read their memory
            with torch.device("cpu"):
                return init(optree.tree_map(lambda p: torch.zeros(p.shape, dtype=p.dtype), params))
        with run.precision():
            return OptaxState(run.leave(run.init(*run.enter(params))))

    def update(grads: Tree, state: OptaxState, params: Tree = None, **extra: Any) -> tuple[Tree, OptaxState]:
        if not trees.plain(grads, params):
            raise RuntimeError("torch cannot differentiate through optax; use stages of fjoin, or torch.no_grad()")
        form = _Shapes.of(grads)
        if trees.has_no_data(grads):
            return grads, state
        if params is not None and (other := _Shapes.of(params)) != form:
            raise ValueError(f"grads and params differ: {form.leaves}, but {other.leaves}")
        run = compiled(form)
        with run.precision():
            given = () if params is None else run.enter(params)
            out, new = run.update(run.enter(grads), [to_array(flat) for flat in state.flats], given)
            flats = run.leave(out)
            return run.tree(flats), OptaxState(run.leave(new))

    return Transform(init, update, Needs.LEAVES if per_leaf else Needs.TREE)


class _Shapes(NamedTuple):
    """The form of a tree of tensors, hashable."""

    structure: Any
    leaves: tuple[tuple[torch.Size, torch.dtype], ...]

    @staticmethod
    def of(tree: Tree) -> _Shapes:
        for path, leaf in trees.named_leaves(tree).items():
            trees.check_dense(f"grads[{path!r}]", leaf)
        leaves, structure = optree.tree_flatten(tree)
        return _Shapes(structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves))


class _CompiledUpdate:
    """A transformation compiled for trees of one form; arguments and results are flat arrays."""

    def __init__(self, begin: Callable[..., Any], step: Callable[..., Any], shapes: _Shapes) -> None:
        self._shapes = shapes
        self._layout = layout = Layout(shapes.leaves)
        concatenate = jax.numpy.concatenate

        def tree_of(flats: Any) -> Any:
            return optree.tree_unflatten(shapes.structure, layout.cut(flats))

        def leaves_of(state: Any) -> list[Any]:
            """The leaves of a state; typed random keys, which are no tensors, as their bits."""
            leaves = jax.tree.leaves(state)
            return [jax.random.key_data(x) if kind else x for x, kind in zip(leaves, kinds, strict=True)]

        def state_of(leaves: list[Any]) -> Any:
            wrap = jax.random.wrap_key_data
            keys = [wrap(x, impl=kind) if kind else x for x, kind in zip(leaves, kinds, strict=True)]
            return jax.tree.unflatten(structure, keys)

        with self.precision():
            given = [jax.ShapeDtypeStruct((numel,), name_of(dtype)) for (dtype, _), numel in layout.sizes.items()]
            kinds: list[Any] = []

            def look(flats: Any) -> Any:
                state = begin(tree_of(flats))
                typed = [jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(state)]
                leaves = zip(jax.tree.leaves(state), typed, strict=True)
                kinds[:] = [jax.random.key_impl(x) if is_key else None for x, is_key in leaves]
                return state

            structure = jax.tree.structure(jax.eval_shape(look, given))
            plain_form = jax.eval_shape(lambda flats: leaves_of(begin(tree_of(flats))), given)
            held = Layout([(x.shape, str(x.dtype)) for x in plain_form])

        def init(*flats: Any) -> Any:
            return held.join(leaves_of(begin(tree_of(flats))), concatenate)

        def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
            new, state = step(tree_of(grads), state_of(held.cut(state)), tree_of(params) if params else None)
            return layout.join(optree.tree_leaves(new), concatenate), held.join(leaves_of(state), concatenate)

        self.init, self.update = jax.jit(init), jax.jit(update)

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which jax computes in 64 bits if a leaf is float64."""
        return jax.enable_x64(any(dtype is torch.float64 for _, dtype in self._shapes.leaves))

    def enter(self, tree: Tree) -> list[Any]:
        leaves = [leaf.detach() for leaf in optree.tree_leaves(tree)]
        return [to_array(flat) for flat in self._layout.join(leaves, torch.cat)]

    def leave(self, flats: Any) -> tuple[Tensor, ...]:
        jax.block_until_ready(flats)
        return tuple(to_tensor(flat) for flat in flats)

    def tree(self, flats: tuple[Tensor, ...]) -> Tree:
        return optree.tree_unflatten(self._shapes.structure, self._layout.cut(flats))


def to_optax(transform: Transform) -> Any:
    """A transform without collectives as an optax transformation, eagerly or under jax.jit.

    Args:
        transform: A `Transform`. jax calls it from a thread of its own, where no axis is bound, so it must not
            communicate.

    Returns:
        An `optax.GradientTransformation`, whose state is a list of arrays.

    Raises:
        ImportError: optax is not installed.
        TypeError: `transform` is no Transform.

    >>> import fjoin.jax
    >>> import jax.numpy as jnp
    >>> from fjoin import transforms as tx
    >>> clip = fjoin.jax.to_optax(tx.clip_by_value(1.0))
    >>> grads = {"a": jnp.array([3.0, 0.5])}
    >>> clip.update(grads, clip.init(grads))[0]["a"].tolist()
    [1.0, 0.5]
    """
    check_transform(transform, "to_optax")
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
                _from_numpy(leaf).to(kind.dtype) if isinstance(kind, Tensor) else type(kind)(leaf)
                for leaf, kind in zip(map(np.asarray, leaves), kinds, strict=True)
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
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
