"""The values of a run that are saved.

Names     the leaves of a pipeline's state by name, with the placement of each; from a state to its values, and back
Snapshot  what one rank has to save: values by name, their placements, and which of them are cut
Slice     of a value that is cut: which elements of the whole this rank has
Values    what a checkpoint holds, by name; a value is read when somebody asks for it

A field of an optimizer's state is called "pipeline.optimizer.<path of the parameter>.<field>", a stage of the hook
"pipeline.hook.<name>#<number>". In a file "@<start>" follows for a slice, and "@rank-<n>" for a value of some ranks only.
The slice of a rank follows from the parameter's path: `Pieces.slices`. A checkpoint of other ranks is cut anew.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeVar

import optree
from torch import Tensor

from .._errors import CheckpointError
from ..records import taken_apart
from ..transforms.base import Placement, Transform, state_dicts
from ..transforms.layout import Pieces, Slice
from ..transforms.pipelines import Pipeline, placed

T = TypeVar("T")
# Reads a value, into the given memory where it fits.
Read = Callable[[Tensor | None], Any]


class Values(Mapping[str, Any]):
    """Name -> value.

    Args:
        reads: Name -> the function that reads the value.
    """

    def __init__(self, reads: dict[str, Read]) -> None:
        self.reads = reads

    def __getitem__(self, name: str) -> Any:
        return self.reads[name](None)

    def into(self, name: str, memory: Tensor) -> Any:
        """The value, which is `memory` itself where it could be read into that."""
        return self.reads[name](memory)

    def __iter__(self) -> Iterator[str]:
        return iter(self.reads)

    def __len__(self) -> int:
        return len(self.reads)

    def under(self, prefix: str, rename: Callable[[str], str] = lambda name: name) -> Values:
        """The values under a prefix, by the rest of their names."""
        return Values({rename(name): read for name, read in under(self.reads, prefix).items()})


def under(values: Mapping[str, T], prefix: str) -> dict[str, T]:
    """The values whose names begin with a prefix and a dot, by the rest of their names."""
    start = f"{prefix}."
    return {name.removeprefix(start): value for name, value in values.items() if name.startswith(start)}


def given(value: Any) -> Read:
    """Reads a value that is there."""
    return lambda memory: value


class Names:
    """The leaves of a state by name, with their placements; computed anew only where a state has another form.

    A name has stages by the names of their specs, as in "pipeline.hook.error_feedback#0.error.w", so that another stage
    in a chain renames none. Leaves that no later call reads have none.

    Args:
        prefix: Where all names begin.
        part: The pipeline or the transform.
        axes: The mesh.
    """

    def __init__(self, prefix: str, part: Pipeline | Transform, axes: Mapping[str, int]) -> None:
        self.prefix, self._part, self._axes = prefix, part, axes
        self.structure: Any = None
        self._positions: list[int] = []  # among the leaves, of those with a name
        self._paths: dict[str, str] = {}  # name -> path in `to_state_dict`
        self._unread: list[tuple[int, str]] = []  # the position, and the path
        self.places: dict[str, Placement] = {}
        self.params: dict[str, tuple[str, ...]] = {}

    def values(self, state: Any) -> dict[str, Any]:
        """Name -> leaf."""
        leaves = self._leaves(state)
        return dict(zip(self.places, map(leaves.__getitem__, self._positions), strict=True))

    def tree(self, like: Any, values: Values, in_place: bool = False) -> Any:
        """The state of the form of `like` from the values by name.

        Args:
            in_place: Whether to take the memory of `like`.

        Raises:
            CheckpointError: other names, shapes or dtypes.
        """
        leaves = self._leaves(like)
        saved = values.under(self.prefix, lambda name: self._paths.get(name, name))
        for i, path in self._unread:
            saved.reads[path] = given(leaves[i])
        for path in [path for path in saved.reads if ".last." in path]:
            # Before 0.3 a residual was in units of weight * gradient, beside the (weight, divisor) of its sums.
            error = self._paths.get(path.replace(".last.", ".error.", 1), "")
            if error in saved.reads:
                saved.reads[error] = _divided(saved.reads[error], saved.reads.pop(path))
        for path in [path for path in saved.reads if path.endswith(".counted") and path not in self._paths.values()]:
            del saved.reads[path]  # of PowerSGD before 0.3
        return tree_from(self.prefix, like, saved, in_place)

    def _leaves(self, state: Any) -> list[Any]:
        leaves, structure = optree.tree_flatten(state)
        if structure != self.structure:
            self.structure = structure
            known, found = state_dicts.names_of(state), {x.path: x for x in placed(self._part, state, self._axes)}
            self._paths = {leaf.name: path for path, leaf in found.items()}
            self._unread = [(i, path) for i, (path, read) in enumerate(known) if not read]
            self._positions, self.places, self.params = [], {}, {}
            for i, (path, read) in enumerate(known):
                _, name, placement, params = found[path]
                if read and placement is not None:
                    self._positions.append(i)
                    self.places[f"{self.prefix}.{name}"] = placement
                    self.params[f"{self.prefix}.{name}"] = params
        return leaves


def _divided(residual: Read, last: Read) -> Read:
    return lambda memory: residual(None) / (float(last(None)[0, 1]) or 1.0)


def tree_from(what: str, like: Any, values: Mapping[str, Any], in_place: bool = False) -> Any:
    """The tree of the form of `like` from values by path.

    Args:
        in_place: Whether to take the memory of `like`.

    Raises:
        CheckpointError: other names, shapes or dtypes.
    """
    try:
        return state_dicts.restored(f"{what} of the checkpoint", like, values, in_place)
    except (ValueError, TypeError) as error:
        anew = (
            "fresh= names what starts anew or is left out, such as the state of a layer that is frozen now, or no more"
        )
        text = f"{error}; it is of another model or pipeline. {anew}: fresh=('pipeline.optimizer.encoder',)"
        raise CheckpointError(text) from error


def matches(name: str, patterns: Collection[str]) -> bool:
    """Whether one of the patterns is the name, the beginning of it up to a dot, or fits it with its `*`."""
    return any(name == one or name.startswith(f"{one}.") or fnmatchcase(name, one) for one in patterns)


# From the name of a value to its slice; None for another value.
Slices = Callable[[str], Slice | None]


def slice_in(pieces: Pieces, params: Mapping[str, Sequence[str]], name: str) -> Slice | None:
    """The slice of a value of a pipeline's state.

    Args:
        params: Name -> the paths of parameters that a value may belong to.
    """
    path = next((path for path in params.get(name, ()) if path in pieces.shapes), None)
    return None if path is None else pieces.slice_of(path)


@dataclass
class Snapshot:
    """The values of one rank.

    Attributes:
        values: Name -> tensor or host number.
        places: Name -> placement.
        slices: The beginning of names -> the slices of values of this name that are cut.
        forms: What slices follow from.
        rank: What only this rank has, as JSON.
        extra: What the user keeps beside it, as JSON, and its tensors, which are among the values.
        by_content: The names of values that may differ between ranks, in form too, and are then saved for each rank.
    """

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, Placement] = field(default_factory=dict)
    slices: dict[str, Slices] = field(default_factory=dict)
    forms: list[Any] = field(default_factory=list)
    rank: dict[str, Any] = field(default_factory=dict)
    by_content: set[str] = field(default_factory=set)
    extra: tuple[Any, Mapping[str, Tensor]] = (None, {})

    def add_extra(self, extra: Any, axes: Iterable[str]) -> None:
        """Add what the user keeps, which is the same on all ranks, and its tensors. Its dicts stay as they are.

        Raises:
            TypeError: it holds something else than numbers, text, None, lists, tuples, tensors, and dicts with text as
                keys.
        """
        tensors: dict[str, Tensor] = {}
        try:
            self.extra = taken_apart(extra, "extra", tensors, plain=True), tensors
        except (TypeError, ValueError, RecursionError) as error:
            form = "JSON, with tensors where you like: numbers, text, lists, and dicts with text as keys"
            raise TypeError(f"extra must be {form}: {error}") from None
        self._add(tensors, dict.fromkeys(tensors, Placement(tuple(axes))))

    def add(self, prefix: str, values: Mapping[str, Any], place: Placement) -> None:
        """Add values under a prefix, all of one placement."""
        named = {f"{prefix}.{name}": value for name, value in values.items()}
        self._add(named, dict.fromkeys(named, place))

    def add_by_content(self, values: Mapping[str, Any], axes: Iterable[str]) -> None:
        """Add values of which it is not known whether they are equal on all ranks."""
        self._add(values, dict.fromkeys(values, Placement(tuple(axes))))
        self.by_content |= values.keys()

    def add_state(self, names: Names, state: Any, pieces: Pieces | None = None) -> None:
        """Add the leaves of a state, which may be cut into these pieces."""
        self._add(names.values(state), names.places)
        if pieces is not None:
            self.slices[names.prefix] = partial(slice_in, pieces, names.params)
            self.forms.append(pieces.fingerprint)

    def include(self, other: Snapshot) -> None:
        """Add what another snapshot has, but what only this rank has and what the user keeps."""
        self._add(other.values, other.places)
        self.slices |= other.slices
        self.forms += other.forms

    def _add(self, values: Mapping[str, Any], places: Mapping[str, Placement]) -> None:
        if not self.values.keys().isdisjoint(values):
            twice = min(self.values.keys() & values.keys())
            raise ValueError(f"two values of the run are called {twice!r}; give the objects other names")
        self.values |= values
        self.places |= places

    def slice_of(self, name: str) -> Slice | None:
        """This rank's slice of a value that is cut; None if it is one of no parameter."""
        for prefix, slices in self.slices.items():
            if name.startswith(f"{prefix}."):
                return slices(name)
        return None
