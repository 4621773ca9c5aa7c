"""Pytrees with paths: operations that optree does not have under one name."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias, TypeVar

import optree
import torch
from torch import Tensor
from torch.autograd import forward_ad

Tree: TypeAlias = Any  # a pytree of tensors
State: TypeAlias = Any  # a pytree of tensors and host integers
N = TypeVar("N", bound=NamedTuple)


def path_string(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def named_leaves(tree: Tree) -> dict[str, Tensor]:
    """Path -> leaf, in optree's order (dict keys sorted).

    Raises:
        ValueError: two leaves have the same path.

    >>> named_leaves({"b": [torch.tensor(1)], "a": torch.tensor(2)})
    {'a': tensor(2), 'b.0': tensor(1)}
    """
    paths, leaves, _ = optree.tree_flatten_with_path(tree)
    named = {path_string(p): leaf for p, leaf in zip(paths, leaves, strict=True)}
    if len(named) < len(leaves):
        twice = sorted(name for name, n in Counter(map(path_string, paths)).items() if n > 1)
        raise ValueError(f"several leaves have the paths {twice}; rename them")
    return named


def flatten_in_insertion_order(tree: Tree) -> tuple[list[str], list[Tensor], Any]:
    """Paths, leaves and structure with dicts in insertion order, in which parameters were registered."""
    with optree.dict_insertion_ordered(True, namespace="fjoin"):
        paths, leaves, structure = optree.tree_flatten_with_path(tree, namespace="fjoin")
    return [path_string(path) for path in paths], leaves, structure


def map_with_path(function: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """`function(path, leaf, *leaves_of_rest)` at every leaf."""
    # Not tree_map_with_path: torch.compile gives its function other paths, without a word.
    paths, leaves, structure = optree.tree_flatten_with_path(tree)
    others = [structure.flatten_up_to(other) for other in rest]
    new = [function(path_string(path), *each) for path, *each in zip(paths, leaves, *others, strict=True)]
    return optree.tree_unflatten(structure, new)


def zeros_like(tree: Tree) -> Tree:
    return optree.tree_map(torch.zeros_like, tree)


def zeros_at_least_f32(tree: Tree) -> dict[str, Tensor]:
    """Path -> zeros in the leaf's shape, in at least float32."""
    return {
        path: torch.zeros_like(leaf, dtype=torch.promote_types(leaf.dtype, torch.float32))
        for path, leaf in named_leaves(tree).items()
    }


def where(condition: Tensor, a: Tree, b: Tree) -> Tree:
    """`a` where the 0-d `condition` holds and `b` where it does not, leaf by leaf; equal non-tensors are kept.

    Where Python can read the condition, nothing is copied.
    """
    known = bool(condition) if readable_without_sync(condition) else None

    def choose(x: Any, y: Any) -> Any:
        if isinstance(x, Tensor):
            return torch.where(condition, x, y) if known is None else x if known else y
        if x != y:
            raise TypeError(f"a host value cannot depend on data: it is {x!r} on one side and {y!r} on the other")
        return x

    return optree.tree_map(choose, a, b)


def fields(state: State) -> list[Any]:
    """The fields of an optimizer's state, including those of states inside it; None for fields that are None."""
    return optree.tree_leaves(state, none_is_leaf=True)


def with_changes(state: N, **changes: Any) -> N:
    """As `state._replace(**changes)`, of which torch.compile of torch 2.11 makes an empty tuple."""
    return type(state)(*(changes.get(name, value) for name, value in zip(state._fields, state, strict=True)))


def with_fields(state: State, new: Iterable[Any]) -> State:
    """The same state with other fields."""
    return optree.tree_unflatten(optree.tree_structure(state, none_is_leaf=True), new)


def all_finite(tree: Tree) -> Tensor:
    """A 0-d bool tensor: whether all leaves are free of NaN and infinities."""
    leaves = [leaf for leaf in optree.tree_leaves(tree) if leaf.is_floating_point()]
    if not leaves:
        return torch.ones((), dtype=torch.bool, device=device_of(()))
    return torch.stack([torch.isfinite(leaf).all() for leaf in leaves]).all()


def global_norm(tree: Tree) -> Tensor:
    """The 2-norm of all leaves together, 0-d, in at least float32; 0 for an empty tree."""
    leaves = optree.tree_leaves(tree)
    if not leaves:
        return torch.zeros((), device=device_of(()))
    wide = [leaf if leaf.dtype in (torch.float32, torch.float64) else leaf.float() for leaf in leaves]
    norms = [torch.linalg.vector_norm(leaf) for leaf in wide]
    return torch.linalg.vector_norm(torch.stack([n.to(torch.promote_types(n.dtype, norms[0].dtype)) for n in norms]))


def plain(*trees: Tree) -> bool:
    """Whether nothing differentiates, maps or traces through these tensors.

    If so, fresh copies of them may be changed in place.
    """
    if transformed():
        return False
    given: Tree = trees
    return not (torch.is_grad_enabled() and any([t.requires_grad for t in optree.tree_leaves(given)]))


def transformed() -> bool:
    """Whether something differentiates, maps or traces what runs."""
    return (
        torch._C._are_functorch_transforms_active() or torch.compiler.is_compiling() or forward_ad._current_level >= 0
    )


def device_of(leaves: Iterable[Tensor]) -> torch.device | None:
    """The device of the first leaf; without leaves that of `default_device_of`, or None."""
    return next((leaf.device for leaf in leaves), _DEFAULT.device)


class _DefaultDevice(threading.local):
    device: torch.device | None = None


_DEFAULT = _DefaultDevice()


@contextlib.contextmanager
def default_device_of(tree: Tree) -> Iterator[None]:
    """Inside a with block, transforms without leaves make their messages on the device of `tree`."""
    before, _DEFAULT.device = _DEFAULT.device, device_of(optree.tree_leaves(tree))
    try:
        yield
    finally:
        _DEFAULT.device = before


def to_device(device: torch.device | None, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor on a device; a tensor from the host is copied without waiting. None: its own device."""
    return x.to(device, dtype or x.dtype, non_blocking=x.device.type == "cpu")


def readable_without_sync(x: Tensor) -> bool:
    """Whether Python can read a tensor's values without waiting for a device.

    It must be on the CPU, and nothing may differentiate, map, trace or fake it.
    """
    if type(x) is not Tensor or not x.is_cpu or (x.requires_grad and torch.is_grad_enabled()):
        return False
    return not transformed() and torch._C._len_torch_dispatch_stack() == 0


def has_no_data(tree: Tree) -> bool:
    """Whether tensors have shapes and dtypes only, as those with which `explain` counts messages."""
    return any(leaf.is_meta for leaf in optree.tree_leaves(tree) if isinstance(leaf, Tensor))
