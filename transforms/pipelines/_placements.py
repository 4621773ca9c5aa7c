"""The placements of a pipeline's state, read off its transforms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ..base import Merge, Placement, State, Transform, placements, timings
from ..combinators import stages
from ._pipeline import Pipeline
from ._plan import axes_of


class Placed(NamedTuple):
    """A leaf of a state, or a dict that is empty."""

    path: str  # of fields, keys and indices, as in `to_state_dict`
    # The same, with stages by the names of their specs: a stage that is added to a chain renames no other one.
    name: str
    placement: Placement | None  # None for an empty dict
    params: tuple[str, ...] = ()  # paths: it belongs to the first parameter that has one of them


def placed(part: Pipeline | Transform, state: State, axes: Iterable[str]) -> Iterator[Placed]:
    """The leaves of a state of a pipeline, or of a transform of values that each rank has by itself."""
    names, top = tuple(axes), At("", "")
    if isinstance(part, Transform):
        yield from _of_part(names, top, part, state, EqualOver())
        return
    own = at_end = _behind(part.hook, EqualOver())
    if part.skips is not None:
        yield from _of_leaves(names, top, state._replace(inner=()), own)
        top, state = top.to("inner"), state.inner
    yield from _of_part(names, top.to("hook"), part.hook, state.hook, EqualOver())
    if part.after is not None:
        yield from _of_part(names, top.to("after"), part.after, state.after, own)
    if part.on_state is not None:
        yield from _of_part(names, top.to("on_state"), part.on_state, state.on_state, own)
        at_end = _behind(part.on_state, own)
    tree = top.to("optimizer")._replace(params=("",), in_tree=True)
    yield from _of_leaves(names, tree, state.optimizer, at_end, Merge.MEAN)
    rest = state._replace(hook=(), optimizer=(), after=(), on_state=())
    yield from _of_leaves(names, top, rest, own, before=EqualOver())


def params_placement(pipeline: Pipeline, axes: Mapping[str, int]) -> Placement:
    """The placement of the parameters that a pipeline steps."""
    own = _behind(pipeline.hook, EqualOver())
    own = own if pipeline.after is None else _behind(pipeline.after, own)
    cut = own.cut if pipeline.sharding is not None and not pipeline.sharding.gathers else None
    equal = own.equal | ({own.cut} if own.cut and not cut else set())  # where they have been gathered
    return Placement(_in_order(tuple(axes), equal), cut, Merge.REFUSE)


def buffers_placement(on_buffers: Transform | None, axes: Mapping[str, int]) -> Placement:
    """The placement of the buffers of a model, each of which a rank changes by itself."""
    equal = set[str]() if on_buffers is None else timings.reduced_over(on_buffers)
    return Placement(_in_order(tuple(axes), equal), None, Merge.MEAN)


class EqualOver(NamedTuple):
    """The axes over which values are equal, and the one over which they are cut."""

    equal: frozenset[str] = frozenset()
    cut: str | None = None


class At(NamedTuple):
    """A place in a state: a path, a name, and the paths of parameters that lead there."""

    path: str
    name: str
    params: tuple[str, ...] = ()
    in_tree: bool = False  # whether it is in the tree of the parameters; else dicts have their paths as keys

    def to(self, field: object, label: object = None) -> At:
        """A place inside, by the name of a field, a key or an index."""
        path = f"{self.path}.{field}" if self.path else str(field)
        name = field if label is None else label
        return self._replace(path=path, name=f"{self.name}.{name}" if self.name else str(name))

    def key(self, key: object, field: object = None) -> At:
        """A place inside, by a key or an index, which may be a part of a parameter's path.

        Args:
            field: The name in the path of the state, where that is another one.
        """
        inside, key = self.to(key if field is None else field), str(key)
        if not self.in_tree:
            return inside._replace(params=(key, key.rpartition(".")[0]))
        above = self.params[-1]
        return inside._replace(params=(*self.params, f"{above}.{key}" if above else key))


def _of_part(names: tuple[str, ...], at: At, part: Transform, state: State, before: EqualOver) -> Iterator[Placed]:
    """The placements of a transform's state.

    Args:
        before: Where its input is equal.
    """
    parts, numbers = stages(part), Counter[str]()
    for i, stage in enumerate(parts):
        kind, own = stage.spec.name, state[i] if len(parts) > 1 else state
        label = f"{kind}#{numbers[kind]}"
        numbers[kind] += 1
        here = at.to(i, label) if len(parts) > 1 else at._replace(name=f"{at.name}.{label}".removeprefix("."))
        yield from _of_stage(names, here, stage, own, before)
        before = _behind(stage, before)


def _of_stage(names: tuple[str, ...], at: At, part: Transform, state: State, before: EqualOver) -> Iterator[Placed]:
    inside, reach = timings.children(part), EqualOver(before.equal | axes_of(part, names), before.cut)
    if type(state) is tuple and len(state) == len(inside):  # each for some leaves
        for i, (child, own) in enumerate(zip(inside, state, strict=True)):
            yield from _of_part(names, at.to(i), child, own, before)
        return
    fields = {1: ("inner",), 2: ("before", "after")}.get(len(inside), ())
    if fields and all(hasattr(state, name) for name in fields):
        for name, child in zip(fields, inside, strict=True):
            yield from _of_part(names, at.to(name), child, getattr(state, name), before)
        state = state._replace(**dict.fromkeys(fields, ()))
    yield from _of_leaves(names, at, state, reach, before=before)


def _of_leaves(
    names: tuple[str, ...],
    at: At,
    state: Any,
    own: EqualOver,
    merge: Merge = Merge.REFUSE,
    before: EqualOver | None = None,
) -> Iterator[Placed]:
    """The placements of leaves.

    Args:
        own: Where leaves without a mark are equal.
        before: Where those are equal that each rank has by itself; by default `own`.
    """
    if hasattr(state, "_fields"):
        kind: Any = type(state)
        fields = placements.marks(kind)
        for i, (name, value) in enumerate(zip(state._fields, state, strict=True)):
            mark, how = fields[name]
            over, inside = own, at.key(i, name) if at.in_tree else at.to(name)
            if mark:
                over = before or own
                if isinstance(value, int):
                    yield Placed(inside.path, inside.name, Placement(_in_order(names, over.equal), None, how or merge))
                    continue
            yield from _of_leaves(names, inside, value, over, how or merge, over if mark else before)
        return
    if isinstance(state, dict):
        if not state:
            yield Placed(at.path, at.name, None)
        for name, value in state.items():
            yield from _of_leaves(names, at.key(name), value, own, merge, before)
    elif isinstance(state, (tuple, list)):
        for i, value in enumerate(state):
            yield from _of_leaves(names, at.key(i) if at.in_tree else at.to(i), value, own, merge, before)
    elif state is not None:
        is_host, common = not isinstance(state, torch.Tensor), isinstance(state, torch.Tensor) and not state.dim()
        equal = frozenset(names) if is_host else own.equal | {own.cut} if own.cut and common else own.equal
        cut = None if is_host or common else own.cut
        yield Placed(at.path, at.name, Placement(_in_order(names, equal), cut, merge), at.params)


def _behind(part: Transform, before: EqualOver) -> EqualOver:
    """Where the output of a transform is equal in every step."""
    equal = before.equal | timings.reduced_over(part)
    cut = part.sharded_over or before.cut
    return EqualOver(equal - {cut}, cut)


def _in_order(names: tuple[str, ...], equal: frozenset[str] | set[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name in equal)
