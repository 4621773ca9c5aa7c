"""`Checkpoints`, `save` and `load`."""

from __future__ import annotations

import json
import math
import os
import platform
import time
import uuid
import warnings
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from .._errors import CheckpointError
from ..groups import Mesh
from ..records import checksum, form, on_each, on_first
from ..training import Metrics, OnSignal
from ._folder import Folder
from ._load import restored
from ._manifest import Manifest
from ._save import Save, SavePlan
from ._sources import LOOP, add_position, source_of
from ._values import Snapshot

_AFTER_AN_ERROR_S = 5.0  # for the files of other ranks, after an error of this one


class Checkpoints:
    """Saves a run every so often, and restores it.

    Every rank makes one, with the same arguments. A save is committed as a whole or not at all: the folder
    `step-00000500` appears once all its bytes are on the disk. It needs a folder that all ranks see.

    Within a `with` block a SIGTERM on any rank of a train_step makes all ranks save after the same step, and ends
    `step.join`; the next loop ends the program, by SystemExit(143). At the end of a block in which `save` was called
    rank 0 warns where no step was due and nothing was restored.

    Args:
        path: The run's folder.
        what: A step from `train_step`, a pipeline of a loop of one's own, or a dict, as for `fjoin.save`.
        mesh: The ranks, for a pipeline or objects; by default all ranks.
        every: Save after steps whose number is a multiple of this.
        every_s: Save a step after this many seconds of rank 0's clock, for a train_step; `float("inf")` saves at a
            SIGTERM alone.
        keep_last: The number of this run's checkpoints to keep, the newest ones; None: all. A run that restores a
            checkpoint goes on as the run that saved it. Those of other runs are neither counted nor deleted.
        keep_every: Also keep those of steps that are multiples of this.
        background: Write while training goes on, from copies of the values; an error is raised by the next save, or
            `wait`, on all ranks.

    Attributes:
        extra: What was kept beside the state in the checkpoint that has been restored.

    Raises:
        TypeError: `what` cannot be saved.
        ValueError: a number below 1; `every_s` for something that is no train_step.

    >>> import tempfile
    >>> from fjoin import transforms as tx
    >>> step = fjoin.train_step(lambda p, x: (p["w"] * x).sum(), tx.fuse(tx.mean("data"), tx.sgd(0.5)))
    >>> with tempfile.TemporaryDirectory() as folder, fjoin.Checkpoints(folder, step, every=2) as runs:
    ...     state, batches = runs.restore({"w": torch.zeros(1)}), step.join(torch.ones(4))
    ...     for batch in batches:
    ...         state, metrics = step(state, batch)
    ...         _ = runs.save(state, metrics, data=batches)
    ...     again = runs.restore({"w": torch.zeros(1)}, data=False)  # only looks
    >>> again.step, again.params["w"]
    (4, tensor([-2.]))
    """

    extra: Any

    def __init__(
        self,
        path: str | os.PathLike[str],
        what: Any,
        *,
        mesh: Mesh | None = None,
        every: int | None = None,
        every_s: float | None = None,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        background: bool = False,
    ) -> None:
        for name, value in (("every", every), ("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be a whole number from 1, or None, got {value!r}")
        self._folder, self._source = Folder(Path(path)), source_of(what, mesh)
        self._mesh, self._requests = self._source.mesh, next(iter(self._source.requests), None)
        if every_s is not None and (self._requests is None or not every_s > 0):
            text = f"every_s must be a number of seconds above 0, for a train_step, got {every_s!r}"
            raise ValueError(f"{text}; other loops save by every=")
        self._every, self._every_s, self._keep = every, every_s, (keep_last, keep_every)
        self._run, self.extra, self._background = "", None, background
        self._asked = False  # whether `save` was called where nothing was due
        self._saving: Save | None = None  # in the background
        self._plan: SavePlan | None = None
        self._back: int | None = None  # the step that was restored, until the next save
        self._saved()
        asks = self._requests
        self._on_signal = None if asks is None else OnSignal(asks.ask_save, asks.ask_stop)

    def _saved(self) -> None:
        """The ranks have saved: earlier requests are done, and the clock of rank 0, which has not asked, begins anew."""
        self._last, self._asks = time.monotonic(), False
        self._saves = 0 if self._requests is None else self._requests.saves_due

    def __enter__(self) -> Self:
        if self._on_signal is not None:
            self._on_signal.install()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._on_signal is not None:
            self._on_signal.uninstall()
        for asks in self._source.requests:
            asks.forget()
        if error is None:
            self.wait()
            # Without a name of the run nothing has been saved or restored.
            if self._asked and not self._run and self._mesh.rank == 0 and (self._every or self._every_s != math.inf):
                text = f"nothing of this run has been saved: no step was due, with every={self._every} and every_s={self._every_s}"
                warnings.warn(f"{text}; save more often, or save(state) at the end", stacklevel=2)
        elif self._saving is not None:  # other ranks may never come to meet this one
            self._saving.give_up(wait_s=_AFTER_AN_ERROR_S)

    def save(self, state: Any, metrics: Metrics | None = None, *, extra: Any = None, data: Any = None) -> Path | None:
        """Save a state where a save is due; on all ranks, after the same step.

        Args:
            state: The state that the step returned; for a pipeline (params, state), for a dict with steps the dict of
                their states, for other objects the number of steps so far.
            metrics: Those of the same call, of the first step of a dict: save where `every` or `every_s` says; None:
                save in any case.
            extra: What else to keep, the same on all ranks: JSON, with tensors in it where you like. Tuples come back
                as lists.
            data: The loop over the data, from `step.join` or `fjoin.join`: its position is saved.

        Returns:
            The folder of the checkpoint, which appears once it is committed; None if none was due.

        Raises:
            CheckpointError: on all ranks: one of them could not write, or the folder holds this step. Nothing has been
                saved.
            NonFinite: on all ranks: the last step was not taken.
            TypeError: `extra` is neither JSON nor tensors.
            ValueError: `metrics` are given, but neither `every` nor `every_s`.
        """
        number = self._source.number(state)
        if metrics is not None:
            if self._every is None and self._every_s is None:
                what = "save(state, metrics) saves the steps that every= or every_s= of Checkpoints name"
                remedy = "pass Checkpoints(..., every=1000) or every_s=600. save(state) saves in any case"
                alone = 'every_s=float("inf") saves at a SIGTERM alone'
                raise ValueError(f"{what}, and neither is given, so it would never save; {remedy}, and {alone}")
            if not self._due(number, metrics):
                self._asked = True
                return None
        self.wait()

        def same(taken: tuple[Snapshot, SavePlan]) -> dict[str, Any]:
            shown, tensors = taken[0].extra
            return {
                "the number of steps": number,
                "extra": json.dumps(shown),
                "a tensor in extra": {name: f"{form(x)}, checksum {checksum([x])}" for name, x in tensors.items()},
                "the presence of data": data is not None,
            }

        remedy = "pass the same on all ranks, such as a mean; what each rank keeps for itself goes into an object with state_dict"
        found, plan = on_each(self._mesh, "the values of a save", lambda: self._taken(state, extra, data), same, remedy)
        plan.refuse_other_forms(self._mesh)
        self._run, name = on_first(self._mesh, "the start of a save", lambda: self._begin(number))
        self._back, axes, spec = None, dict(self._mesh.shape), self._source.spec
        manifest = Manifest(self._run, uuid.uuid4().hex, number, "", axes, spec, extra=found.extra[0])
        manifest.library = {"torch": str(torch.__version__), "python": platform.python_version()}
        self._saving = Save(self._folder, name, self._mesh, manifest, self._keep, found, plan, self._background)
        stops = self._requests is not None and self._requests.stop_due
        if self._background and not stops:
            self._saving.warn()
        else:
            self.wait()
        self._saved()
        for asks in self._source.requests:
            asks.over |= self._source.requests[0].signalled
            # Another step than the first may be the one that the loop listens to.
            if stops and asks is not self._requests:
                asks.ask_stop()
        return self._folder.step_path(number)

    def _due(self, number: int, metrics: Metrics) -> bool:
        """Whether to save after this step: the same on all ranks."""
        if not metrics.stepped:
            return False
        asks = self._requests
        if asks is not None and self._every_s is not None and self._mesh.rank == 0 and not self._asks:
            if time.monotonic() - self._last > self._every_s:
                asks.ask_save()
                self._asks = True
        asked = asks is not None and asks.saves_due > self._saves
        return asked or (self._every is not None and number % self._every == 0)

    def _taken(self, state: Any, extra: Any, data: Any) -> tuple[Snapshot, SavePlan]:
        found = self._source.snapshot(state)
        found.add_extra(extra, self._mesh.shape)
        if any(asks.in_loop for asks in self._source.requests):
            found.rank[LOOP] = True
        if data is not None and data is not False:
            add_position(found, data)
        if self._plan is None or not self._plan.fits(found):
            self._plan = SavePlan(self._mesh.shape, self._mesh.rank, found)
        return found, self._plan

    def _begin(self, step: int) -> tuple[str, str]:
        """On rank 0: the identifier of the run, and a new folder's name.

        Steps newer than the restored one are set aside.
        """
        return self._run or uuid.uuid4().hex, self._folder.begin(step, self._back).name

    def wait(self) -> None:
        """Wait for the save under way, on all ranks.

        Raises:
            CheckpointError: on all ranks: one of them could not write. Nothing has been saved.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.end()
            saving.warn()

    def restore(
        self,
        params: Any = None,
        buffers: dict[str, Tensor] | None = None,
        *,
        step: int | None = None,
        fresh: tuple[str, ...] = (),
        data: Any = None,
    ) -> Any:
        """The state of the newest checkpoint that verifies, or a new one where the folder holds none; on all ranks.

        The next save sets newer checkpoints aside. What starts anew starts from the parameters of the checkpoint.

        Args:
            params: The parameters at the start, as for `step.init`, for a dict with steps a dict of them; None: a dict
                of those of the checkpoint. A parameter that was a buffer when it was saved is read from that, and the
                reverse.
            buffers: The buffers at the start, likewise.
            step: Take the checkpoint of this step.
            fresh: Names of values that start anew: in full, their beginnings up to a dot, such as "pipeline.after", or
                with `*`.
            data: The loop over the data, whose position is loaded. False: the script skips `state.batches` itself, or
                only looks.

        Warns:
            UserWarning: on rank 0, without `fresh`: the checkpoint is of a pipeline with other arguments, such as
                another learning rate. The loop `data` goes on from another place, of another checkpoint. Without
                `data`: the state was saved within a joined loop.

        Raises:
            CheckpointError: on all ranks: the folder holds checkpoints, but none verifies; one of another model,
                pipeline or mesh.
            ValueError: parameters of one optimizer have taken other numbers of steps, since some begin anew.
        """
        self.wait()
        found = restored(self._folder, self._source, params, buffers, step, fresh, data)
        if found is None:
            if params is None and self._source.trees:
                raise CheckpointError(f"{self._folder.path} holds no checkpoint; pass the parameters at the start")
            return self._source.start(params, buffers)
        state, manifest, self.extra = found
        self._run, self._back = manifest.run, manifest.step
        return state


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
        what: A step from `train_step`, a pipeline of a loop of one's own, or a dict of these and of objects with
            `state_dict` and `load_state_dict`, such as modules, optimizers and handles of registered modules. The first
            step or pipeline of a dict gives the number of the checkpoint.
        state: Of a train_step its state, of a pipeline (params, state), of a dict with such the dict of their states,
            of other objects the number of steps so far.
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
    found = restored(Folder(Path(path)), source, params, buffers, step, fresh, False if data is None else data)
    if found is None:
        raise CheckpointError(f"{path} holds no checkpoint; save one, or begin with Checkpoints(...).restore(params)")
    return found[0]
