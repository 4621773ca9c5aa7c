"""A restore: a state with the values of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from .._folder import Folder
from .._leaves import Leaves
from ..values._extra import extra_together
from ..values._together import on_each
from ._choice import chosen
from ._load import Load, empty_params, filled, refuse_fresh_params
from ._positions import position_of
from ._sources import Source


class Restored(NamedTuple):
    """What a restore gives."""

    state: Any
    run: str
    step: int
    extra: Any
    note: str  # how the pipelines differ


def restored(
    folder: Folder,
    source: Source,
    params: Any,
    buffers: dict[str, Tensor] | None,
    step: int | None,
    fresh: tuple[str, ...],
    data: Any,
) -> Restored | None:
    """The newest checkpoint that verifies, or None where there is none; the arguments are those of `Checkpoints.restore`.

    Raises:
        CheckpointError: on all ranks.
    """
    asked = {"step": step, "fresh": list(fresh), "the presence of data": data is not None}
    on_each(source.mesh, "the start of a restore", dict, lambda _: asked)
    leaves = chosen(folder, source.mesh, step)
    if leaves is None:
        return None
    with leaves:
        return _from(leaves, source, params, buffers, fresh, data)


def _from(
    leaves: Leaves, source: Source, params: Any, buffers: dict[str, Tensor] | None, fresh: tuple[str, ...], data: Any
) -> Restored:
    mesh, manifest = source.mesh, leaves.manifest
    if params is None:
        refuse_fresh_params(manifest.leaves, fresh)
        params = empty_params(manifest.leaves)
    state = source.start(params, buffers)
    if fresh and source.needs_params:  # what starts anew starts from the parameters and buffers of the checkpoint

        def read_params() -> tuple[Any, Any]:
            values = Load(leaves, mesh, source.snapshot(state), fresh).values
            return filled("params", params, values), buffers and filled("buffers", buffers, values)

        state = source.start(*on_each(mesh, "the parameters of a checkpoint", read_params))

    def read() -> tuple[Callable[[], Any], Callable[[], None], Any]:
        load = Load(leaves, mesh, source.snapshot(state), fresh)
        own, values = load.own(), load.values
        place = position_of(values, own, data)
        return source.load(state, values, own), place, extra_together(manifest.extra, values)

    take, place, extra = on_each(mesh, "the values of a checkpoint", read)  # nothing has changed yet
    loaded = on_each(mesh, "the end of a load", lambda: (take(), place())[0])
    spec = source.about().spec
    differs = manifest.spec != spec and not fresh
    note = f"the checkpoint is of {manifest.spec}, and this run of {spec}; its values are taken" if differs else ""
    return Restored(loaded, manifest.run, manifest.step, extra, note)
