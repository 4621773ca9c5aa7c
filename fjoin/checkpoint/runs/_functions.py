"""One checkpoint by hand."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from torch import Tensor

from ..._errors import CheckpointError
from ...groups._mesh import Mesh
from .._folder import Folder
from ._checkpoints import Checkpoints
from ._restore import restored
from ._sources import source_of


def save(
    path: str | os.PathLike[str],
    what: Any,
    state: Any,
    *,
    extra: Any = None,
    data: Any = None,
    mesh: Mesh | None = None,
) -> Path:
    """Save a checkpoint in a run's folder; on all ranks, after the same step.

    Args:
        path: The run's folder.
        what: A step from `train_step`, a pipeline of a loop of one's own, or a dict of objects with `state_dict` and
            `load_state_dict`, such as modules, optimizers and handles of registered modules.
        state: Of a train_step its state, of a pipeline (params, state), of objects the number of steps so far.
        extra, data, mesh: As for `Checkpoints`.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: on all ranks, as `Checkpoints.save`.

    >>> import tempfile
    >>> from fjoin import transforms as tx
    >>> pipeline, params = tx.fuse(tx.identity(), tx.sgd(0.5)), {"w": torch.ones(1)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = fjoin.save(folder, pipeline, (params, pipeline.init(params)), extra={"note": "at the start"})
    ...     params, state = fjoin.load(folder, pipeline)
    >>> params, state.step
    ({'w': tensor([1.])}, 0)
    """
    found = Checkpoints(path, what, mesh=mesh, keep_last=None).save(state, extra=extra, data=data)
    assert found is not None
    return found


def load(
    path: str | os.PathLike[str],
    what: Any,
    params: Any = None,
    buffers: dict[str, Tensor] | None = None,
    *,
    step: int | None = None,
    fresh: tuple[str, ...] = (),
    data: Any = None,
    mesh: Mesh | None = None,
) -> Any:
    """The newest checkpoint that verifies in a run's folder; on all ranks.

    Args:
        path, what, mesh: As for `save`.
        params: A tree of the form of the parameters; None: a dict by path.
        buffers, step, fresh, data: As for `Checkpoints.restore`.

    Returns:
        What was given to `save` as the state.

    Raises:
        CheckpointError: on all ranks: there is no checkpoint, or as `Checkpoints.restore`.

    >>> import tempfile
    >>> model = torch.nn.Linear(2, 1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = fjoin.save(folder, {"model": model}, 3)
    ...     fjoin.load(folder, {"model": torch.nn.Linear(2, 1)})
    3
    """
    source = source_of(what, mesh)
    found = restored(Folder(Path(path)), source, params, buffers, step, fresh, data)
    if found is None:
        raise CheckpointError(
            f"{path} holds no checkpoint; save one there first, or begin a run with Checkpoints(...).restore(params)"
        )
    if found.note and source.mesh.rank == 0:
        warnings.warn(found.note, stacklevel=2)
    return found.state
