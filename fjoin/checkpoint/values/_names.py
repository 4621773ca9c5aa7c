"""The names of a state's leaves in a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

import optree

from ..._errors import CheckpointError
from ...transforms.pipelines._pipeline import Pipeline
from ...transforms.pipelines._placements import placed
from ...transforms.transform._transform import Transform
from ...transforms.tree._placement import Placement
from ...transforms.tree._state_dict import names_of, restored
from ._values import Values


class Names:
    """The leaves of a state by name, with their placements; computed anew only where a state has another form.

    A name has stages by the names of their specs, as in "pipeline.hook.error_feedback#0.error.w", so that another stage in a chain
    renames none. Leaves that no later call reads have none.

    Args:
        prefix: Where all names begin.
        part: The pipeline or the transform.
        axes: The mesh.
    """

    def __init__(self, prefix: str, part: Pipeline | Transform, axes: Mapping[str, int]) -> None:
        self.prefix, self._part, self._axes = prefix, part, axes
        self.structure: Any = None
        self._positions: list[int] = []  # among the leaves, of those with a name
        self._paths: dict[str, str] = {}  # name -> path in `to_state_dict`, of leaves and empty dicts
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
        saved = values.under(self.prefix, self._path)
        for i, path in self._unread:
            saved.set(path, leaves[i])
        return tree_from(self.prefix, like, saved, in_place)

    def _leaves(self, state: Any) -> list[Any]:
        leaves, structure = optree.tree_flatten(state)
        if structure != self.structure:
            self.structure = structure
            known, found = names_of(state), {leaf.path: leaf for leaf in placed(self._part, state, self._axes)}
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

    def _path(self, name: str) -> str:
        """The path of a name; of one in a dict that is still empty at the start, behind that of the dict."""
        words = name.split(".")
        for length in range(len(words), 0, -1):
            if (start := ".".join(words[:length])) in self._paths:
                return ".".join([self._paths[start], *words[length:]])
        return name


def tree_from(what: str, like: Any, values: Mapping[str, Any], in_place: bool = False) -> Any:
    """The tree of the form of `like` from values by path.

    Args:
        in_place: Whether to take the memory of `like`.

    Raises:
        CheckpointError: other names, shapes or dtypes.
    """
    try:
        return restored(f"{what} of the checkpoint", like, values, in_place)
    except CheckpointError:
        raise
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{error}; it is of another model or pipeline") from error


def matches(name: str, patterns: Collection[str]) -> bool:
    """Whether one of the patterns is the name, the beginning of it up to a dot, or fits it with its `*`."""
    return any(name == one or name.startswith(f"{one}.") or fnmatchcase(name, one) for one in patterns)
