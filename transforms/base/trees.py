"""Pytrees of tensors by path: walks, checks, choices between two trees, and parts of them."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import optree
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

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


def nodes(tree: Tree, kind: type[N]) -> list[N]:
    """The nodes of a class in a tree, those inside another one apart."""
    found = optree.tree_leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in found if isinstance(node, kind)]


def with_changes(state: N, **changes: Any) -> N:
    """As `state._replace(**changes)`, of which torch.compile of torch 2.11 makes an empty tuple."""
    return type(state)(*[changes.get(name, value) for name, value in zip(state._fields, state, strict=True)])


def with_fields(state: State, new: Iterable[Any]) -> State:
    """The same state with other fields."""
    return optree.tree_unflatten(optree.tree_structure(state, none_is_leaf=True), new)


def all_finite(tree: Tree) -> Tensor:
    """A 0-d bool tensor: whether all leaves are free of NaN and infinities."""
    leaves = [leaf for leaf in optree.tree_leaves(tree) if leaf.is_floating_point()]
    if not leaves:
        return torch.ones((), dtype=torch.bool, device=device_of(()))
    # Ten times faster; finite numbers may have an infinite norm.
    if all(map(readable_without_sync, leaves)) and math.isfinite(sum(map(float, torch._foreach_norm(leaves)))):
        return torch.ones((), dtype=torch.bool)
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


def copy_if_aliased(state: Tree, lent: Tree) -> Tree:
    """The state, with copies of its tensors that share memory with tensors in `lent`; the copies are detached."""
    if not (leaves := optree.tree_leaves(state)):
        return state
    own = apart_from(optree.tree_leaves(lent))
    with torch.no_grad():
        return state if all(own(leaf) is leaf for leaf in leaves) else optree.tree_map(own, state)


def apart_from(lent: Iterable[Tensor]) -> Callable[[Any], Any]:
    """A function that clones a tensor that shares memory with one of these, and returns any other value unchanged."""
    # The same for all views of one tensor, and 0 for what holds no elements.
    starts = {x.untyped_storage().data_ptr() for x in lent if isinstance(x, Tensor)} - {0}

    def own(x: Any) -> Any:
        if type(x) is not Tensor and (not isinstance(x, Tensor) or is_traceable_wrapper_subclass(x)):
            return x
        return x.clone() if x.layout is torch.strided and x.untyped_storage().data_ptr() in starts else x

    return own


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


# What to write where a module was given in the place of its parameters.
OF_MODULE = "; write apply, params, buffers = fjoin.functional(module), call apply(params, buffers, x) in loss_fn, and pass params"


def check_same(name: str, tree: Tree, like_name: str, like: Tree) -> None:
    """Raise unless `tree` has the structure, shapes and dtypes of `like`.

    Raises:
        ValueError: another structure, shape or device, with the path.
        TypeError: another dtype, or a leaf that is no dense real floating-point tensor.
    """
    if _alike(tree, like):
        return
    have, want = named_leaves(tree), named_leaves(like)
    if have.keys() != want.keys():
        missing, extra = sorted(want.keys() - have.keys()), sorted(have.keys() - want.keys())
        raise ValueError(
            f"{name} and {like_name} differ in structure: {name} lacks {missing} and has the additional {extra}; "
            f"pass {name} with the structure of {like_name}"
        )
    for path, leaf in have.items():
        other, here, there = want[path], f"{name}[{path!r}]", f"{like_name}[{path!r}]"
        check_dense(here, leaf)
        check_dense(there, other)
        if leaf.shape != other.shape:
            raise ValueError(f"{here} has shape {tuple(leaf.shape)}, but {there} has shape {tuple(other.shape)}")
        if leaf.dtype != other.dtype:
            both = f"{here} has dtype {leaf.dtype}, but {there} has dtype {other.dtype}"
            raise TypeError(f"{both}; convert one of them with .to(dtype)")
        if leaf.device != other.device:
            both = f"{here} lies on {leaf.device}, but {there} on {other.device}"
            raise ValueError(f"{both}; move one with .to(device)")


def _alike(a: Tree, b: Tree) -> bool:
    """Whether the trees surely pass `check_same`, found without their paths."""
    leaves, structure = optree.tree_flatten(a)
    try:
        others = structure.flatten_up_to(b)  # much faster than a second flatten, which sorts the keys of dicts
    except ValueError:
        return False
    return all(
        [
            isinstance(x, Tensor)
            and isinstance(y, Tensor)
            and x.dtype is y.dtype
            and x.is_floating_point()
            and x.shape == y.shape
            and x.device == y.device
            and x.layout is torch.strided
            for x, y in zip(leaves, others, strict=True)
        ]
    )


def check_dense(name: str, leaf: Any) -> None:
    """Raise TypeError unless `leaf` is a strided, real, floating-point tensor."""
    if not isinstance(leaf, Tensor):
        shown = f"a {type(leaf).__name__}" if isinstance(leaf, nn.Module) else f"{leaf!r}, a {type(leaf).__name__}"
        hint = "; torch.from_dlpack(array) makes one of it" if hasattr(leaf, "__dlpack__") else ""
        hint = OF_MODULE if isinstance(leaf, nn.Module) else hint
        raise TypeError(f"{name} is {shown}; expected a tensor{hint}")
    if leaf.layout is not torch.strided:
        raise TypeError(
            f"{name} has layout {leaf.layout}; sparse gradients are not supported, use a dense one "
            f"(for nn.Embedding: sparse=False, or grad.to_dense())"
        )
    if leaf.is_complex():
        raise TypeError(f"{name} has complex dtype {leaf.dtype}; pass torch.view_as_real(tensor) instead")
    if not leaf.is_floating_point():
        raise TypeError(f"{name} has dtype {leaf.dtype}; only floating-point tensors can be trained")


_SMALL = 16  # elements; copies of as few cost nothing


def choose_state(fine: Tensor, new: Any, old: Any) -> State:
    """`new` where `fine`, `old` otherwise; host counters are always those of `new`, since they count calls.

    A tensor that is in a state several times is chosen once, and so are all small tensors of one shape: each choice is
    a launch. NaN in one state does not reach the other.

    Args:
        fine: A 0-d bool tensor.
        new, old: The states, or functions that return them. Of a state from a function each tensor is freed once it has
            been chosen or left, so that at no time three states are in memory.

    A state with a method `choose(fine, old)` is replaced by the result of that method.
    """
    paths, leaves, structure = _by_path(new)
    before = dict(zip(*_by_path(old)[:2], strict=True))
    olds = [before.pop(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]  # the first call may add names
    places, groups = _together(fine, leaves, olds)
    for some in groups.values():
        _choose(fine, leaves, olds, some)
    return optree.tree_unflatten(structure, [leaves[i] for i in places])


def _by_path(state: Any) -> tuple[list[Any], list[Any], Any]:
    while callable(state):
        state = state()
    return optree.tree_flatten_with_path(state, is_leaf=lambda node: hasattr(node, "choose"))


def _together(fine: Tensor, leaves: list[Any], olds: list[Any]) -> tuple[list[int], dict[Any, list[int]]]:
    """The place from which each leaf gets its chosen tensor, and the places of those that are chosen together."""
    first: dict[Any, int] = {}
    groups: dict[Any, list[int]] = {}
    places = list(range(len(leaves)))
    for i, (new, old) in enumerate(zip(leaves, olds, strict=True)):
        if hasattr(new, "choose"):
            leaves[i] = new.choose(fine, old)
        elif isinstance(new, Tensor) and isinstance(old, Tensor) and new is not old:
            key: Any = i
            if not transformed():  # the compiler knows no identities
                places[i] = first.setdefault((id(new), id(old)), i)
                forms = [(x.shape, x.dtype, x.device, type(x)) for x in (new, old)]
                if new.numel() <= _SMALL and type(new) is Tensor and forms[0] == forms[1]:
                    key = forms[0]
            if places[i] == i:
                groups.setdefault(key, []).append(i)
    return places, groups


def _choose(fine: Tensor, leaves: list[Any], olds: list[Any], some: list[int]) -> None:
    """Put the chosen tensors of one shape in the places of the new ones, in one choice."""
    new, old = [of[some[0]] if len(some) == 1 else torch.stack([of[i] for i in some]) for of in (leaves, olds)]
    all_of = (new, old) if leaves[some[0]].dim() else (new, old, fine)
    # On the host it would have to wait for the device.
    device = next((x.device for x in all_of if x.device.type != "cpu"), new.device)
    chosen = torch.where(to_device(device, fine), to_device(device, new), to_device(device, old))
    for i, tensor in zip(some, [chosen] if len(some) == 1 else chosen.unbind(0), strict=True):
        leaves[i], olds[i] = tensor, None


def restrict(state: State, paths: Collection[str], chosen: Collection[str]) -> State:
    """A state without the parameters that are not chosen.

    Args:
        state: A state whose values for parameters are in dicts keyed by their paths.
        paths: The paths of all parameters.
        chosen: The paths to keep.

    >>> restrict(({"a": 1, "b": 2}, 3), ["a", "b"], ["b"])
    ({'b': 2}, 3)
    """
    return _zip([state], lambda dicts: {p: v for p, v in dicts[0].items() if p in chosen}, set(paths))


def only(state: State, paths: Collection[str], path: str, name: str) -> State:
    """A state of one path alone, under another name.

    >>> only(({"a": 1, "b": 2}, 3), ["a", "b"], "b", "c")
    ({'c': 2}, 3)
    """
    return _zip([state], lambda dicts: {name: dicts[0][path]} if path in dicts[0] else {}, set(paths))


def merge(states: Sequence[State], paths: Collection[str]) -> State:
    """One state from the states of all buckets; common values are taken from the first.

    >>> merge([({"a": 1}, 3), ({"b": 2}, 3)], ["a", "b"])
    ({'a': 1, 'b': 2}, 3)
    """
    return _zip(list(states), lambda dicts: {p: v for part in dicts for p, v in part.items()}, set(paths))


def _zip(states: list[State], join: Callable[[list[dict[str, Any]]], dict[str, Any]], paths: set[str]) -> State:
    """Merge states of one form; `join` merges the dicts keyed by paths."""
    first = states[0]
    if isinstance(first, dict):
        if any(state for state in states) and all(state.keys() <= paths for state in states):
            return join(states)
        return {key: _zip([state[key] for state in states], join, paths) for key in first}
    if isinstance(first, (tuple, list)):
        children = [_zip(list(column), join, paths) for column in zip(*states, strict=True)]
        return type(first)(*children) if hasattr(first, "_fields") else type(first)(children)
    return first
