"""The folder of a run: one folder for each step, which is there whole or not at all.

A step is written in `.tmp-<uuid>` and renamed to `step-00000500`. It holds the files of tensors, `manifest.json`, which
covers every byte of them, and `COMMIT`, which covers the manifest.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from pathlib import Path

from .._errors import CheckpointError
from ._files import make_folders, sync_folder, typed_errors
from ._manifest import Commit, Manifest, check_files, read_commit, read_step, write_commit

_STEP = re.compile(r"step-(\d{8,})")


class Folder:
    """The folder of a run. It is made by the first `begin`.

    Args:
        path: The folder; links in the place of its steps and files are refused.
    """

    def __init__(self, path: Path | str) -> None:
        self.path: Path = Path(path)

    def step_path(self, step: int) -> Path:
        """The folder of a step, whether it exists or not."""
        return self.path / f"step-{step:08d}"

    def begin(self, step: int, after: int | None = None) -> Path:
        """Make a new temporary folder for the files of a step.

        Args:
            after: The step from which the run goes on, where it does: newer ones are set aside.

        Raises:
            CheckpointError: The step, or a newer one, exists, or the system refuses. Nothing is written then.
        """
        if after is None or step <= after:
            self._refuse_existing(step)
        if after is not None:
            self.quarantine(after)
        if newer := [other for other in self.steps() if other > step]:
            back = "Checkpoints.restore(step=...): the next save of the same object sets the newer ones aside"
            remedy = f"choose another folder, or go back to an older step by {back}"
            raise CheckpointError(f"{self.path} holds step {newer[-1]}, and step {step} is to be saved; {remedy}")
        make_folders(self.path)
        temporary = self._temporary()
        with typed_errors(f"make {temporary}"):
            os.mkdir(temporary)
        return temporary

    def commit(self, tmp: Path, manifest: Manifest) -> Path:
        """Make a temporary folder the folder of its step, durably. One rank calls it when all files are written.

        Args:
            tmp: What `begin` returned, which holds the manifest's files, each durable, and nothing else.
            manifest: Of the step; `parent` is the id of the newest step in the folder.

        Returns:
            The step's folder.

        Raises:
            CheckpointError: The step exists, the newest step is not the parent, the files are not those of the
                manifest, or the system refuses. The step does not exist then, unless the message says that it may.
        """
        target = self.step_path(manifest.step)
        check_files(tmp, manifest)
        commit = write_commit(tmp, manifest)
        sync_folder(tmp)
        self._refuse_existing(manifest.step)  # as late as possible: a rename would replace an empty folder
        self._check_parent(manifest)
        try:
            os.rename(tmp, target)
        except OSError as error:
            if self._commit_in(target) != commit:  # a network file system may report an error of what it has done
                raise CheckpointError(f"cannot rename {tmp} to {target}: {error}; the step is not saved") from error
        try:
            sync_folder(self.path)
        except CheckpointError as error:
            raise CheckpointError(f"{target} is written, but may be lost if the machine stops now: {error}") from error
        return target

    def steps(self) -> list[int]:
        """All steps, ascending, also those that cannot be read."""
        with typed_errors(f"list {self.path}"):
            names = os.listdir(self.path) if self.path.exists() else []
        matches = [match for name in names if (match := _STEP.fullmatch(name))]
        return sorted(int(match[1]) for match in matches if self.step_path(int(match[1])).name == match[0])

    def newest(self) -> int | None:
        """The newest step, committed or not; None if there is none."""
        return max(self.steps(), default=None)

    def newest_id(self) -> str:
        """The identifier of the newest step, or "" where there is none."""
        newest = self.newest()
        return "" if newest is None else read_commit(self.step_path(newest)).id

    def read(self, step: int) -> tuple[Path, Manifest]:
        """The folder and the manifest of a step.

        Raises:
            CheckpointError: There is no such step, or its manifest is not the one that was committed.
        """
        path = self.refuse_missing(step)
        manifest = read_step(path)
        if manifest.step != step:
            raise CheckpointError(f"{path} holds step {manifest.step}; call it {self.step_path(manifest.step).name}")
        return path, manifest

    def refuse_missing(self, step: int) -> Path:
        """The folder of a step, which must exist.

        Raises:
            CheckpointError: it does not.
        """
        path = self.step_path(step)
        if not os.path.lexists(path):
            raise CheckpointError(f"{path} does not exist; {self.path} holds the steps {self.steps()}")
        return path

    def quarantine(self, newer_than: int) -> None:
        """Rename the steps after this one to `step-00000500.rejected-<uuid>`."""
        for step in self.steps():
            if step > newer_than:
                target = self.path / f"{self.step_path(step).name}.rejected-{uuid.uuid4().hex}"
                with typed_errors(f"rename {self.step_path(step)} to {target.name}"):
                    os.rename(self.step_path(step), target)
                sync_folder(self.path)

    def retain(self, keep_last: int, keep_every: int | None, run: str) -> list[int]:
        """Delete the steps of a run, except the newest ones and those that `keep_every` divides. Returns the deleted
        ones.

        Steps of other runs, and steps whose COMMIT cannot be read, are left alone.
        """
        found = {step: self._commit_in(self.step_path(step)) for step in self.steps()}
        own = [step for step, commit in found.items() if commit is not None and commit.run == run]
        deleted = [step for step in own[:-keep_last] if keep_every is None or step % keep_every]
        for step in deleted:
            temporary = self._temporary()
            with typed_errors(f"delete {self.step_path(step)}"):
                os.rename(self.step_path(step), temporary)  # so that no half of a step is ever under its name
            sync_folder(self.path)
            self.discard(temporary)
        return deleted

    def discard(self, tmp: Path) -> None:
        """Delete a temporary folder, such as that of a save that has failed."""
        with typed_errors(f"delete {tmp}"):
            shutil.rmtree(tmp)

    def _temporary(self) -> Path:
        return self.path / f".tmp-{uuid.uuid4().hex}"

    def _commit_in(self, path: Path) -> Commit | None:
        """The COMMIT in a step's folder; None if it cannot be read."""
        try:
            return read_commit(path)
        except CheckpointError:
            return None

    def _refuse_existing(self, step: int) -> None:
        if os.path.lexists(target := self.step_path(step)):
            raise CheckpointError(f"{target} exists, and a step is never replaced; choose another folder, or remove it")

    def _check_parent(self, manifest: Manifest) -> None:
        """The newest step is the parent; else two runs write to this folder."""
        steps, newest = self.steps(), self.newest_id()
        if newest != manifest.parent or steps[-1:] >= [manifest.step]:
            held = f"step {steps[-1]} with id {newest}" if steps else "no step"
            follow = f"step {manifest.step} was to follow {manifest.parent or 'no step'!r}"
            raise CheckpointError(f"{self.path} holds {held}; {follow}: another run writes there")
