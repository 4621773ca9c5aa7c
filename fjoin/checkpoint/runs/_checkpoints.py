"""The checkpoints of a run."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from ..._errors import CheckpointError
from ...groups._mesh import Mesh
from ...training.state._metrics import Metrics
from .._commits import read_step
from .._folder import Folder
from .._manifest import Manifest
from ._load import Load
from ._save import Save
from ._snapshot import Snapshot
from ._sources import empty_params, source_of


class Checkpoints:
    """Saves a run every so often, and restores it.

    Every rank makes one, with the same arguments. A save is committed as a whole or not at all: the folder `step-00000500` appears
    once all its bytes are on the disk. It needs a folder that all ranks see.

    Args:
        path: The run's folder.
        what: A step from `train_step`, a pipeline of a loop of one's own, or a dict of objects with `state_dict` and
            `load_state_dict`, such as modules, optimizers and handles of registered modules.
        every: Save after steps whose number is a multiple of this.
        keep_last: The number of checkpoints to keep, the newest ones.
        mesh: The ranks, for a pipeline or objects; by default all ranks.
        background: Write while training goes on. A save then copies the values and returns; an error is raised by the next save, or by
            `wait`, on all ranks.
        keep_every: Also keep those of steps that are multiples of this.

    Attributes:
        extra: What was kept beside the state in the checkpoint that has been restored.

    Raises:
        TypeError: `what` cannot be saved.
        ValueError: a number below 1.

    >>> import tempfile
    >>> from fjoin import transforms as tx
    >>> step = fjoin.train_step(lambda p, x: (p["w"] * x).sum(), tx.fuse(tx.mean("data"), tx.sgd(0.5)))
    >>> with tempfile.TemporaryDirectory() as folder, fjoin.Checkpoints(folder, step, every=2) as runs:
    ...     state = runs.restore({"w": torch.zeros(1)})
    ...     for batch in torch.ones(4):
    ...         state, metrics = step(state, batch)
    ...         _ = runs.save(state, metrics)
    ...     again = runs.restore({"w": torch.zeros(1)})
    >>> again.step, again.params["w"]
    (4, tensor([-2.]))
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        what: Any,
        *,
        mesh: Mesh | None = None,
        every: int | None = None,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        background: bool = False,
    ) -> None:
        for name, value in (("every", every), ("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be a whole number from 1, or None, got {value!r}")
        self._folder, self._source = Folder(Path(path)), source_of(what, mesh)
        self._mesh = self._source.mesh
        self._every, self._keep_last, self._keep_every = every, keep_last, keep_every
        self._run, self.extra, self._background = "", None, background
        self._saving: Save | None = None  # in the background

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()

    # -- save ---------------------------------------------------------------------------------

    def save(self, state: Any, metrics: Metrics | None = None, *, extra: Any = None, data: Any = None) -> Path | None:
        """Save a state where a save is due; on all ranks, after the same step.

        Args:
            state: The state that the step returned; for a pipeline (params, state), for objects the number of steps so far.
            metrics: Those of the same call; None: save in any case.
            extra: What else to keep, the same on all ranks: JSON.
            data: The loop over the data, from `step.join`: its position is saved.

        Returns:
            The folder of the checkpoint, which appears once it is committed; None where none was due.

        Raises:
            CheckpointError: on all ranks: one of them could not write, or the folder holds this step. Nothing has been saved.
            NonFinite: on all ranks: the last step was not taken.
            TypeError: `extra` is no JSON.
        """
        number, every = self._source.number(state), self._every
        due = metrics is None or (metrics.stepped and every is not None and number % every == 0)
        if not due:
            return None
        self.wait()
        position = {} if data is None else {"data": data.state_dict()}
        taken = self._tried(lambda: self._taken(state, extra))
        run = self._run or uuid.uuid4().hex
        self._run = self._agreed("the start of a save", lambda: run if _fine(taken) else "")
        about = {**self._source.about()._asdict(), "extra": extra}
        save = Save(self._folder, self._mesh, self._run, about, self._retain)
        save.begin(number, taken["made"], position, copies=self._background)
        self._saving = save
        if self._background:
            save.start()
        else:
            save.run()
            self.wait()
        return save.path

    def wait(self) -> None:
        """Wait for the save under way, on all ranks.

        Raises:
            CheckpointError: on all ranks: one of them could not write. Nothing has been saved.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.end()

    def _retain(self) -> None:
        if self._keep_last is not None:
            self._folder.retain(self._keep_last, self._keep_every, self._run)

    def _taken(self, state: Any, extra: Any) -> Snapshot:
        check_json(extra)
        return self._source.snapshot(state)

    # -- restore ------------------------------------------------------------------------------

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

        Newer checkpoints that do not verify are set aside, so that training can save their steps again.

        Args:
            params: The parameters at the start, as for `step.init`.
            buffers: The buffers at the start, likewise.
            step: Take the checkpoint of this step.
            fresh: Names, or beginnings of names, such as "pipeline.after", that start anew.
            data: The loop over the data, from `step.join`, whose position is loaded.

        Raises:
            CheckpointError: on all ranks: the folder holds checkpoints, but none verifies; one of another model, pipeline or mesh.
        """
        chosen = self._agreed("the choice of a checkpoint", lambda: self._choose(step), first=True)
        if chosen is None:
            if params is None:
                raise CheckpointError(f"{self._folder.path} holds no checkpoint; pass the parameters at the start")
            return self._source.start(params, buffers)
        read = self._tried(lambda: _read_again(self._folder.step_path(chosen[0]), chosen[1]))
        self._agreed("the manifest of a load", lambda: _fine(read))
        manifest = read["made"]
        state = self._source.start(empty_params(manifest.leaves) if params is None else params, buffers)
        made = self._tried(lambda: self._read(state, manifest, fresh))
        self._agreed("the end of a load", lambda: _fine(made))
        self._run, self.extra = manifest.run, manifest.extra
        position = self._own(manifest).get("data")
        if data is not None and position is not None:
            data.load_state_dict(position)
        return made["made"]

    def holds(self) -> bool:
        """Whether the folder holds a checkpoint; on all ranks."""
        return bool(self._agreed("a look for checkpoints", lambda: self._folder.newest() is not None, first=True))

    def _choose(self, step: int | None) -> list[Any] | None:
        """(step, identifier) of the checkpoint to load; on rank 0."""
        if step is not None:
            _, manifest = self._folder.read(step)
        else:
            newest = self._folder.newest_verified()
            if newest is None:
                return None
            manifest = newest.manifest
        self._folder.quarantine(manifest.step, manifest.run)
        return [manifest.step, manifest.id]

    def _read(self, state: Any, manifest: Manifest, fresh: tuple[str, ...]) -> Any:
        like = self._source.snapshot(state)
        values = Load(self._folder.step_path(manifest.step), manifest, self._mesh).values(like, fresh)
        kept = {name: value for name, value in like.values.items() if name.startswith(fresh or ("\0",))}
        return self._source.load(state, {**values, **kept}, self._own(manifest))

    def _own(self, manifest: Manifest) -> dict[str, Any]:
        """What only this rank has saved; on other numbers of ranks, nothing but what objects are made of."""
        if manifest.axes == dict(self._mesh.shape):
            return manifest.ranks[self._mesh.rank]
        return {name: value for name, value in manifest.ranks[0].items() if name != "data"}

    # -- the ranks ----------------------------------------------------------------------------

    def _agreed(self, occasion: str, make: Callable[[], Any], first: bool = False) -> Any:
        """The JSON value of rank 0, or of each rank; an error of one is raised on all."""
        tried = self._tried(make) if not first or self._mesh.rank == 0 else {"made": None}
        shown = {"error": str(tried["error"])} if "error" in tried else {"made": tried["made"]}
        for rank, one in enumerate(found := self._mesh.exchange(occasion, shown, list)):
            if "error" in one:
                raise tried.get("error") or CheckpointError(f"rank {rank}: {one['error']}")
        return found[0]["made"]

    @staticmethod
    def _tried(make: Callable[[], Any]) -> dict[str, Any]:
        try:
            return {"made": make()}
        except Exception as error:  # the other ranks wait for this one
            return {"error": error}


def check_json(extra: Any) -> None:
    """Raise TypeError unless a value can be kept as JSON."""
    try:
        json.dumps(extra, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"extra must be JSON, that is numbers, text, and lists and dicts of them: {error}") from None


def _fine(tried: dict[str, Any]) -> bool:
    """True; raises the error of a call that has failed."""
    if "error" in tried:
        raise tried["error"]
    return True


def _read_again(path: Path, identifier: str, wait_s: float = 60.0) -> Manifest:
    """The manifest of a step, which a network's file system may show late to some ranks."""
    end = time.monotonic() + wait_s
    while True:
        try:
            manifest = read_step(path)
        except CheckpointError:
            if path.exists() or time.monotonic() > end:
                raise
            time.sleep(0.1)
            continue
        if manifest.id != identifier:
            raise CheckpointError(f"{path} is another checkpoint than rank 0 has chosen; all ranks must see one folder")
        return manifest
