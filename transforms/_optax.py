"""optax's transformations here, and these transforms in optax."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import optree
import torch
from torch import Tensor

from ._base import Scope, Transform, check_transform
from ._spec import factory
from ._tree import State, Tree, check_dense, named_leaves, plain


class OptaxState(NamedTuple):
    flats: tuple[Tensor, ...]  # the leaves of optax's state, those of one dtype in one flat tensor


@factory
def from_optax(transformation: Any, scope: Scope = "tree") -> Transform:
    """An optax transformation as a stage: any that needs no more than gradients and parameters.

    It is compiled by jax for the tree at hand. All tensors of one dtype cross to jax and back as one flat tensor, by
    DLPack, without a copy where memory is aligned; jax cuts them into leaves.

    An optax optimizer gives what is to be added to parameters, which `sgd(1.0, maximize=True)` does:
    `fuse(chain(mean("data"), from_optax(optax.adamw(1e-3))), sgd(1.0, maximize=True))`.

    Args:
        transformation: An `optax.GradientTransformation`; with `fuse`, it is given the parameters too.
        scope: What it may be given, if less than the whole tree is enough, as for `Transform`.

    Returns:
        A `Transform`. State: `OptaxState(flats)`.

    Raises:
        ImportError: jax is not installed.
        TypeError: what is no pair of `init` and `update`.
        RuntimeError: at `update`: gradients or parameters that something differentiates through.

    Same as: optax, with torch's tensors.

    >>> import optax
    >>> from fjoin import transforms as tx
    >>> clip = tx.from_optax(optax.clip(1.0))
    >>> grads = {"a": torch.tensor([3.0, 0.5]), "b": torch.tensor(-2.0)}
    >>> clip.update(grads, clip.init(grads), grads)[0]
    {'a': tensor([1.0000, 0.5000]), 'b': tensor(-1.)}
    """
    if not (isinstance(transformation, tuple) and len(transformation) == 2 and all(map(callable, transformation))):
        raise TypeError(f"from_optax takes an optax.GradientTransformation, got {transformation!r}")
    _jax()

    @functools.lru_cache(maxsize=16)
    def compiled(shapes: _Shapes) -> _Compiled:
        return _Compiled(*transformation, shapes)

    def init(params: Tree) -> OptaxState:
        run = compiled(_Shapes.of(params))
        with run.precision():
            return OptaxState(run.leave(run.init(*run.enter(params))))

    def update(grads: Tree, state: OptaxState, params: Tree = None, **extra: Any) -> tuple[Tree, OptaxState]:
        del extra
        if not plain(grads, params):
            raise RuntimeError(
                "torch cannot differentiate through optax; use a stage of fjoin.transforms, or torch.no_grad()"
            )
        form = _Shapes.of(grads)
        if params is not None and (other := _Shapes.of(params)) != form:
            raise ValueError(
                f"grads and params differ: {form.shapes} of {form.dtypes}, but {other.shapes} of {other.dtypes}"
            )
        run = compiled(form)
        with run.precision():
            given = () if params is None else run.enter(params)
            out, new = run.update(run.enter(grads), [_to_jax(flat) for flat in state.flats], given)
            flats = run.leave(out)
            return run.tree(flats), OptaxState(run.leave(new))

    return Transform(init, update, scope=scope, vmappable=False)


class _Shapes(NamedTuple):
    """The form of a tree of tensors, hashable."""

    structure: Any
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]

    @staticmethod
    def of(tree: Tree) -> _Shapes:
        for path, leaf in named_leaves(tree).items():
            check_dense(f"grads[{path!r}]", leaf)
        leaves, structure = optree.tree_flatten(tree)
        return _Shapes(structure, tuple(leaf.shape for leaf in leaves), tuple(leaf.dtype for leaf in leaves))


class _Compiled:
    """A transformation for trees of one form, between flat arrays."""

    def __init__(self, begin: Callable[..., Any], step: Callable[..., Any], shapes: _Shapes) -> None:
        jax = _jax()
        self._shapes = shapes
        self._dtypes = tuple(dict.fromkeys(shapes.dtypes))
        layout = _Layout([(shape, dtype) for shape, dtype in zip(shapes.shapes, shapes.dtypes, strict=True)])
        self._layout = layout

        def tree_of(flats: Any) -> Any:
            return optree.tree_unflatten(shapes.structure, layout.cut(flats))

        def form() -> tuple[Any, Any]:
            given = [jax.ShapeDtypeStruct((layout.sizes[d],), _name(d)) for d in layout.sizes]
            leaves, structure = jax.tree.flatten(jax.eval_shape(lambda flats: begin(tree_of(flats)), given))
            if keys := [leaf for leaf in leaves if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)]:
                raise TypeError(
                    f"the state holds {len(keys)} of jax's typed random keys, which are no tensors; use raw keys"
                )
            return _Layout([(leaf.shape, str(leaf.dtype)) for leaf in leaves]), structure

        with self.precision():
            held, structure = form()

        def init(*flats: Any) -> Any:
            return held.join(jax.tree.leaves(begin(tree_of(flats))))

        def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
            old = jax.tree.unflatten(structure, held.cut(state))
            new, state = step(tree_of(grads), old, tree_of(params) if params else None)
            return layout.join(optree.tree_leaves(new)), held.join(jax.tree.leaves(state))

        self.init, self.update = jax.jit(init), jax.jit(update)

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """jax computes in 64 bits only where it is told to."""
        return _jax().enable_x64(torch.float64 in self._dtypes)

    def enter(self, tree: Tree) -> list[Any]:
        leaves = optree.tree_leaves(tree)
        flats = []
        for dtype in self._dtypes:
            parts = [leaf.detach().reshape(-1) for leaf in leaves if leaf.dtype is dtype]
            flats.append(_to_jax(torch.cat(parts) if len(parts) > 1 else parts[0]))
        return flats

    def leave(self, flats: Any) -> tuple[Tensor, ...]:
        _jax().block_until_ready(flats)
        return tuple(_to_torch(flat) for flat in flats)

    def tree(self, flats: tuple[Tensor, ...]) -> Tree:
        return optree.tree_unflatten(self._shapes.structure, self._layout.cut(flats))


class _Layout:
    """Where each leaf lies in the flat arrays, of which there is one for each dtype."""

    def __init__(self, leaves: list[tuple[Any, Any]]) -> None:
        self.sizes: dict[Any, int] = {}
        self._places = []
        for shape, dtype in leaves:
            at, numel = self.sizes.setdefault(dtype, 0), int(np.prod(shape))
            self._places.append((dtype, at, numel, tuple(shape)))
            self.sizes[dtype] = at + numel

    def cut(self, flats: Any) -> list[Any]:
        of = dict(zip(self.sizes, flats, strict=True))
        return [of[dtype][at : at + numel].reshape(shape) for dtype, at, numel, shape in self._places]

    def join(self, leaves: list[Any]) -> tuple[Any, ...]:
        jnp = _jax().numpy
        parts: dict[Any, list[Any]] = {dtype: [] for dtype in self.sizes}
        for (dtype, *_), leaf in zip(self._places, leaves, strict=True):
            parts[dtype].append(jnp.ravel(leaf))
        return tuple(jnp.concatenate(some) for some in parts.values())


def to_optax(transform: Transform) -> Any:
    """A transform without collectives as an optax transformation, eagerly or under jax.jit.

    Args:
        transform: A `Transform`. jax calls it back from a thread of its own, where no axis is bound, so it must not
            communicate.

    Returns:
        An `optax.GradientTransformation`, whose state is a list of arrays.

    Raises:
        ImportError: jax or optax is not installed.
        TypeError: what is no Transform.

    >>> import jax.numpy as jnp
    >>> from fjoin import transforms as tx
    >>> clip = to_optax(tx.clip_by_value(1.0))
    >>> grads = {"a": jnp.array([3.0, 0.5])}
    >>> clip.update(grads, clip.init(grads))[0]["a"].tolist()
    [1.0, 0.5]
    """
    check_transform(transform, "to_optax")
    jax = _jax()
    import optax  # type: ignore[import-untyped]

    def arrays(state: State) -> list[Any]:
        """The leaves of a state as numpy arrays, of dtypes that jax has at the time."""
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
            # Host integers and flags decide what runs, so they come back as what they were.
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
    return _jax().ShapeDtypeStruct(array.shape, array.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _to_jax(flat: Tensor) -> Any:
    jax = _jax()
    if not flat.numel():
        return jax.numpy.zeros((0,), _name(flat.dtype))
    return jax.dlpack.from_dlpack(flat.contiguous())


def _to_torch(array: Any) -> Tensor:
    if not array.size:
        return torch.zeros(0, dtype=getattr(torch, str(array.dtype)))
    return torch.from_dlpack(array)  # type: ignore[attr-defined]


def _jax() -> Any:
    try:
        import jax
        import jax.dlpack
    except ImportError:
        raise ImportError("this needs jax and optax: pip install 'fjoin[optax]'") from None
    return jax
