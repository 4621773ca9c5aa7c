"""The parameters of a module that at least one rank has used, where a pass need not use all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..agreement._record import Record
from ..groups._mesh import Mesh
from ..transforms.tree._bucketwise import merge, restrict


class UsedParameters:
    """Records the parameters that get a gradient, on this rank and on the others.

    Args:
        params: Path -> parameter.
        mesh: The ranks.
    """

    def __init__(self, params: Mapping[str, Tensor], mesh: Mesh) -> None:
        self._record = Record(mesh, tuple(mesh.shape), list(params), small=True)
        self._here = here = set[str]()
        for path, p in params.items():
            p.register_post_accumulate_grad_hook(lambda _, path=path: here.add(path))  # type: ignore[misc]

    def anywhere(self) -> set[str]:
        """The parameters that have had a gradient on some rank since the last call; sends one small message."""
        bits = {path: float(path in self._here) for path in self._record.names}
        self._here.clear()
        return {path for path, bit in self._record.send(bits).wait().items() if bit}


def keep_unused_state(
    used: set[str] | None, new: tuple[Any, ...], old: tuple[Any, ...], paths: Mapping[str, Any]
) -> tuple[Any, ...]:
    """A hook's states after a pass, with the old state for parameters that no rank has used.

    Args:
        used: The parameters that some rank has used; None for all.
    """
    if used is None or len(used) == len(paths):
        return new
    rest = paths.keys() - used
    return tuple(
        merge([restrict(after, paths, used), restrict(before, paths, rest)], paths)
        for after, before in zip(new, old, strict=True)
    )
