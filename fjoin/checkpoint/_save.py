"""One save: which rank writes what; each rank writes its file and a list of what is in it, and rank 0 commits."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import threading
import warnings
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._errors import CheckpointError
from ..groups import Communicator
from ..records import Replicas, form, on_each
from ..transforms.axes import Grid
from ..transforms.base import Placement
from ._files import FileEntry, check_form, write_blocks, write_file
from ._folder import Folder
from ._manifest import Leaf, LeafPart, Manifest, leaf_of
from ._values import Snapshot


def _part(found: Snapshot, name: str, value: Tensor, cut: str | None) -> tuple[Any, int | None] | None:
    """The shape of the whole value, and the start of this rank's slice, if it is one; None if this rank holds
    nothing.
    """
    if not cut:
        return value.shape, None
    own = found.slice_of(name)
    if own is None:
        raise ValueError(f"{name!r} is cut over {cut!r}, but belongs to no parameter; it cannot be saved")
    if not own.holds:
        return None
    whole = own.whole or value.dim() != 1 or value.numel() != own.stop - own.start
    return (value.shape, None) if whole else (own.shape, own.start)


class SavePlan:
    """What this rank writes of values, and compares; computed once for values of the same names, placements and shapes.

    Args:
        axes: The mesh.
        rank: This rank.
        found: A snapshot of the form.
        spread: Whether values that several ranks have are spread over their files.

    Attributes:
        names: Name in the file -> name of the value.
        leaves: The leaves of the manifest that these are parts of.
        numbers: The names of the values that are no tensors, and that this rank saves: rank 0 those that all have.
        replicas: Compares the values that ranks should have in common.

    Raises:
        TypeError, ValueError: a value that cannot be written.
    """

    def __init__(self, axes: Mapping[str, int], rank: int, found: Snapshot, spread: bool = True) -> None:
        # Equal for values to which the same plan applies.
        self._fits = found.places | {}, list(found.forms)
        self._kinds = [_kind(value) for value in found.values.values()]
        tensors = {name: value for name, value in found.values.items() if isinstance(value, Tensor)}
        for name, value in tensors.items():
            check_form(name, value)
        forms = {name: form(value) for name, value in tensors.items()}
        # Along some axes, the ranks that have the value of this rank.
        members = functools.cache(functools.partial(Grid(axes).members, rank))
        # Name -> a text that the ranks have in common which should have equal values.
        groups = {name: f"{members(p.equal)[0]} {p.equal}" for name, p in found.places.items() if p.equal}
        self.replicas = Replicas(groups, forms)
        numbers = [name for name in found.values if name not in tensors]
        self.numbers = [name for name in numbers if not rank or set(found.places[name].equal) != set(axes)]
        # Name -> dtype and shape, of values that all ranks have.
        common = [name for name in found.values if name not in found.by_content and not found.places[name].cut]
        self._forms = {name: forms.get(name) or type(found.values[name]).__name__ for name in common}
        self._digest = zlib.crc32(repr(self._forms).encode())
        self.names, self.leaves = dict[str, str](), dict[str, Leaf]()
        written: dict[tuple[str, ...], list[int]] = {}  # along these axes, what each rank has been given so far
        for path, value in tensors.items():
            equal, cut, merge = found.places[path]
            load = written.setdefault(equal, [0] * len(members(equal)))
            writer = load.index(min(load))
            load[writer] += value.nbytes if spread and not cut else 0
            part = _part(found, path, value, cut)
            if part is None or members(equal)[writer] != rank:
                continue
            shape, start = part
            of = members(equal)[0] if set(axes) - {*equal, cut} else None  # whose value it is; None: that of all
            name = path + ("" if start is None else f"@{start}") + ("" if of is None else f"@rank-{of}")
            if name in self.names:
                both = f"{self.names[name]!r} and {path!r}"
                raise ValueError(f"{both} are both called {name!r} in the file; rename one")
            self.names[name] = path
            shown: dict[str, Any] = {"equal": list(equal), "cut": cut, "merge": merge.value}
            dtype = str(value.dtype).removeprefix("torch.")
            if path in found.by_content and of is not None:  # other ranks may have another form, or none
                shown |= {"of": path, "rank": of}
                path, of = name, None
            self.leaves[path] = Leaf([*shape], dtype, shown, [LeafPart(rank, name, of, start)])

    def fits(self, found: Snapshot) -> bool:
        """Whether it is the plan of these values too."""
        # One by one: a list of them all makes Python's garbage collector run.
        pairs = zip(self._kinds, found.values.values(), strict=True)
        return self._fits == (found.places, found.forms) and all(kind == _kind(value) for kind, value in pairs)

    def refuse_other_forms(self, mesh: Communicator) -> None:
        """Raise CheckpointError on all ranks where they have values of other names or forms."""
        if len(set(mesh.exchange("the form of the values", self._digest, list))) == 1:
            return
        pairs = Replicas(dict.fromkeys(self._forms, "all"), {}).apart(mesh, "the forms that differ", self._forms)
        name, (rank, other) = min(pairs.items()) if pairs else ("their order", (mesh.rank, 0))
        what = f"{name} of rank {rank} is another than on rank {other}, here it is {self._forms.get(name, 'not there')}"
        remedy = "all ranks must save the same pipeline and parameters"
        raise CheckpointError(f"the ranks have values of other names or forms: {what}; {remedy}", rank=rank)


def _kind(value: Any) -> Any:
    """The dtype and shape of a tensor, or the type of a number."""
    return (value.dtype, value.shape) if isinstance(value, Tensor) else type(value)


_SMALL = 1 << 16  # elements; smaller tensors are copied together, since a copy from a device takes long to begin


@torch.no_grad()
def copied(tensors: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
    """Copies on the CPU: a function that returns them by name, which makes the views of small ones in the thread that
    writes.
    """
    large, small = dict[str, Tensor](), dict[Any, dict[str, Tensor]]()
    for name, value in tensors.items():
        if value.numel() <= _SMALL:
            small.setdefault((value.dtype, value.device), {})[name] = value
        else:
            large[name] = value.to("cpu", copy=True)
    # `cat` copies a single tensor too. Only shapes are kept: what the caller holds may get another one.
    flats = [torch.cat([value.reshape(-1) for value in some.values()]).cpu() for some in small.values()]
    shapes = [{name: value.shape for name, value in some.items()} for some in small.values()]

    def views() -> dict[str, Tensor]:
        found = dict(large)
        for forms, flat in zip(shapes, flats, strict=True):
            parts = flat.split([shape.numel() for shape in forms.values()])
            found |= {name: part.view(shape) for (name, shape), part in zip(forms.items(), parts, strict=True)}
        return found

    return views


_ROUND_S = 0.2  # between two meetings of ranks that wait for files
_LOOK_S = 0.02  # between two looks for another rank's file
_AFTER_THE_END_S = 60.0  # to wait for it when the program has ended


class Save:
    """One save, in which all ranks take part. In a thread the ranks meet in the folder, and send nothing.

    It is to be followed by `end` or `give_up`.

    Args:
        folder: The folder of the run.
        name: The name of the temporary folder, which rank 0 has made.
        mesh: The ranks.
        manifest: What is the same on all ranks.
        keep: The number of checkpoints to keep, or None for all, and the steps of which multiples are kept.
        found: The values.
        plan: Of values of this form.
        copies: Whether to copy the values, so that the next step may overwrite them.

    Raises:
        CheckpointError: on all ranks: one of them could not copy its values.
    """

    def __init__(
        self,
        folder: Folder,
        name: str,
        mesh: Communicator,
        manifest: Manifest,
        keep: tuple[int | None, int | None],
        found: Snapshot,
        plan: SavePlan,
        copies: bool,
    ) -> None:
        self._folder, self._tmp, self._mesh = folder, folder.path / name, mesh
        self._manifest, self._keep = manifest, keep
        self._error: Exception | None = None
        self._given_up, self._ended = threading.Event(), threading.Event()
        self._ended.set()  # until the thread begins
        self._texts: list[str] = []  # of warnings
        try:
            plan = self._compare(found, plan)
            mine = {name: found.values[path] for name, path in plan.names.items()}
            self._tensors = on_each(mesh, "the copies of a save", lambda: copied(mine) if copies else lambda: mine)
        except BaseException:
            self.give_up()
            raise
        numbers = {path: found.values[path] for path in plan.numbers}
        self._side = {"numbers": numbers, "rank": found.rank, "leaves": plan.leaves}
        atexit.register(self._tell)
        self._ended.clear()
        try:
            threading.Thread(target=self._guarded, name="fjoin save").start()
        except RuntimeError as error:  # raised by `end`, on all ranks
            self._error = error
            self._ended.set()

    def _compare(self, found: Snapshot, plan: SavePlan) -> SavePlan:
        """Note the replicas that have drifted apart. Returns the plan with the places of values by content."""
        odd = plan.replicas.apart(self._mesh, "a comparison of replicas", found.values)
        apart = odd.keys() - (found.places.keys() - found.by_content)  # also those that only other ranks have
        found.places |= dict.fromkeys(apart & found.places.keys(), Placement(()))
        drift = {name: ranks for name, ranks in odd.items() if name not in apart}
        notes = [f"{name} of rank {rank} differs from that of rank {other}" for name, (rank, other) in drift.items()]
        self._manifest.notes = notes
        if notes and self._mesh.rank == 0:
            few = "; ".join(notes[:3]) + (f"; and {len(notes) - 3} more" if notes[3:] else "")
            self._texts.append(f"replicas have drifted apart; those of the lowest rank are saved: {few}")
        return SavePlan(self._mesh.shape, self._mesh.rank, found, spread=not notes) if odd else plan

    def warn(self) -> None:
        """Warn of what has been found, on rank 0; when no other rank waits for it, since warnings may be errors."""
        texts, self._texts = self._texts, []
        for text in texts:
            warnings.warn(text, stacklevel=3)

    def _tell(self) -> None:
        """At the end of the program: warn of an error that nobody has waited for."""
        if self._error is not None:
            text = f"at the end of the program: step {self._manifest.step} has not been saved: {self._error}"
            warnings.warn(text, stacklevel=1)

    def end(self) -> None:
        """Wait until all ranks have written, and the checkpoint is committed.

        The ranks meet every so often, so none waits for another rank's file longer than its mesh allows, and a lost one
        is noticed.

        Raises:
            CheckpointError: on all ranks: one of them could not write. Nothing is left behind.
        """
        try:
            failed = self._wait()
        except BaseException:
            self.give_up()
            raise
        atexit.unregister(self._tell)
        if failed is not None:
            self.give_up()
            text = f"step {self._manifest.step} has not been saved: {failed}"
            raise CheckpointError(text, step=self._manifest.step) from self._error

    def _wait(self) -> str | None:
        """Wait for the threads of all ranks; returns what one of them has failed with."""
        wait_s, failed = 0.0, None  # no rank waits before all have begun
        while True:
            self._ended.wait(wait_s)
            own = None if self._error is None else f"{type(self._error).__name__}: {self._error}"
            states = self._mesh.exchange("the end of a save", [not self._ended.is_set(), own], list)
            for rank, (_, error) in enumerate(states):
                failed = failed or (f"rank {rank}: {error}" if error else None)
            if failed:
                self._given_up.set()
            if not any(alive for alive, _ in states):
                return failed
            wait_s = _ROUND_S

    def give_up(self, wait_s: float = 0.0) -> None:
        """Wait for this rank's file only, and delete what has been written but not committed.

        Args:
            wait_s: How long the other ranks' files may still take, whose threads write on.
        """
        atexit.unregister(self._tell)
        self._ended.wait(wait_s)
        self._given_up.set()
        self._ended.wait()  # not `join`, which does not wait again once it has been interrupted
        if self._mesh.rank == 0 and self._tmp.exists():
            with contextlib.suppress(CheckpointError):  # which would hide the error that is the reason
                self._folder.discard(self._tmp)

    def _guarded(self) -> None:
        try:
            self._write()
            if self._mesh.rank == 0:
                self._commit()
        except Exception as error:  # raised by `end`
            self._error = error
        finally:
            self._ended.set()

    def _write(self) -> None:
        """Write this rank's file, then the list, which appears as a whole."""
        name, tensors = f"rank-{self._mesh.rank:05d}-of-{self._mesh.size:05d}.safetensors", self._tensors()
        self._tensors = dict  # so that nothing is kept
        entry = write_file(self._tmp / name, tensors)
        # Not every reader of JSON knows NaN.
        side = json.dumps(self._side | {"file": entry}, default=vars, allow_nan=False)
        own = self._side_path(self._mesh.rank)
        write_blocks(new := own.with_suffix(".new"), [side.encode()])
        os.rename(new, own)

    def _commit(self) -> None:
        """On rank 0: wait for the files of the others, and commit."""
        manifest = self._manifest
        manifest.parent = self._folder.newest_id()
        for rank in range(self._mesh.size):
            side = self._side_of(rank)
            manifest.files.append(FileEntry(**side["file"]))
            manifest.ranks.append(side["rank"])
            for path, leaf in side["leaves"].items():
                manifest.leaves.setdefault(path, leaf_of(leaf | {"parts": []})).parts.extend(leaf_of(leaf).parts)
            for path, value in side["numbers"].items():
                manifest.numbers.setdefault(path, []).append(value)
        for rank in range(self._mesh.size):
            self._side_path(rank).unlink()
        self._folder.commit(self._tmp, manifest)
        last, every = self._keep
        try:
            if last is not None:
                self._folder.retain(last, every, manifest.run)
        except CheckpointError as error:  # this step is saved
            self._texts.append(f"old checkpoints could not be deleted: {error}")

    def _side_path(self, rank: int) -> Path:
        """A rank's list, until rank 0 has put it into the manifest."""
        return self._tmp / f"rank-{rank:05d}.json"

    def _side_of(self, rank: int) -> dict[str, Any]:
        """What a rank has written, once it has."""
        path = self._side_path(rank)
        left_s = _AFTER_THE_END_S
        while not path.exists():  # a folder that hosts share tells nobody of new files
            if self._given_up.wait(_LOOK_S) or left_s < 0:
                raise CheckpointError(f"rank {rank} has not written its file", rank=rank)
            if not threading.main_thread().is_alive():  # nobody is left to notice that a rank is lost
                left_s -= _LOOK_S
        side: dict[str, Any] = json.loads(path.read_bytes())
        return side
