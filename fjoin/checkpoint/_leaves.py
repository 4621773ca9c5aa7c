"""The leaves of a checkpoint, and the newest that verifies."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._errors import CheckpointError
from ._files import DAMAGED, typed_errors
from ._folder import Folder
from ._manifest import OWN_FILES, Leaf, Manifest, Part
from ._safetensors import DTYPES, TensorFile


class Leaves:
    """The leaves of one step's folder. Files are opened when a leaf of them is read first, and each byte is checked once.

    Args:
        folder: The step's folder.
        manifest: Its manifest.
    """

    folder: Path
    manifest: Manifest

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._files: dict[int, TensorFile] = {}

    def __enter__(self) -> Leaves:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def file(self, index: int) -> TensorFile:
        """An open file of the manifest's list."""
        if index not in self._files:
            entry = self.manifest.files[index]
            self._files[index] = TensorFile(self.folder / entry.name, entry)
        return self._files[index]

    def part(self, path: str, part: Part, memory: Tensor | None = None) -> Tensor:
        """A part of a leaf: the whole shape, or of a piece its elements, (n,). In the leaf's dtype.

        Args:
            memory: As for `TensorFile.read`.

        Raises:
            CheckpointError: The file does not hold it, in this shape and dtype, or is damaged.
        """
        self.check(path, part)
        if self.manifest.leaves[path].dtype == "complex128":
            return torch.view_as_complex(self.file(part.file).read(part.name))
        return self.file(part.file).read(part.name, memory)

    def check(self, path: str, part: Part) -> int:
        """Compare a part's shape and dtype with its leaf, without reading it. Returns the number of its elements."""
        leaf, file = self.manifest.leaves[path], self.file(part.file)
        double = leaf.dtype == "complex128"
        shape, dtype = file.shape(part.name), file.dtype(part.name)
        own = shape[:-1] if double and shape[-1:] == (2,) else shape
        fits = list(own) == leaf.shape if part.start is None else len(own) == 1
        fits = fits and (part.start or 0) + math.prod(own) <= math.prod(leaf.shape) and (own is not shape or not double)
        if not fits or dtype != (torch.float64 if double else DTYPES[leaf.dtype]):
            found, form = f"{dtype} {list(shape)}", f"{leaf.dtype} {leaf.shape}"
            where = f"{file.path}: {part.name!r}, a part of {path!r} from element {part.start or 0} on"
            raise CheckpointError(f"{where}, is {found}, which does not fit {form}; {DAMAGED}")
        return math.prod(own)

    def values(self, path: str) -> dict[str, Tensor]:
        """The values of a leaf: one under its path where all ranks have it or its pieces make a whole.

        Else one for each rank, under `path@rank-3`, or for each piece, under `path@rank-3[start]`.
        """
        leaf = self.manifest.leaves[path]
        pieces = sorted(leaf.parts, key=lambda part: (part.start or 0, part.rank or 0))
        ends = [0, *itertools.accumulate(self.check(path, part) for part in pieces)]
        if [*(part.start for part in pieces), math.prod(leaf.shape)] != ends:
            return {_label(path, part): self.part(path, part) for part in pieces}
        whole = torch.empty(math.prod(leaf.shape), dtype=DTYPES[leaf.dtype], device="cpu")
        for part, begin, end in zip(pieces, ends, ends[1:], strict=False):
            whole[begin:end] = self.part(path, part)
        return {path: whole.reshape(leaf.shape)}

    def verify(self, share: tuple[int, int] = (0, 1)) -> None:
        """Raise CheckpointError where something is wrong with the files; the first problems are named."""
        if problems := self.problems(share):
            raise CheckpointError("; ".join(problems[:3]) + (f"; {len(problems) - 3} more" if problems[3:] else ""))

    def problems(self, share: tuple[int, int] = (0, 1)) -> list[str]:
        """What is wrong with the files: every byte, missing and unexpected files, parts that do not fit their leaves.

        Args:
            share: (rank, ranks) of those who look at a share of the files and leaves each.
        """
        rank, ranks = share
        with typed_errors(f"list {self.folder}"):
            found = set(os.listdir(self.folder)) - OWN_FILES
        listed = {entry.name for entry in self.manifest.files}
        problems = [f"{self.folder / name} is unexpected; remove it" for name in sorted(found - listed)]
        broken = set()
        for index in range(rank, len(self.manifest.files), ranks):
            try:
                self.file(index).verify()
            except CheckpointError as error:
                problems.append(str(error))
                broken.add(index)
        for path, leaf in itertools.islice(self.manifest.leaves.items(), rank, None, ranks):
            if not broken & {part.file for part in leaf.parts}:
                try:
                    self._check_leaf(path, leaf)
                except CheckpointError as error:
                    problems.append(str(error))
        return problems

    def _check_leaf(self, path: str, leaf: Leaf) -> None:
        end = 0
        for part in sorted(leaf.parts, key=lambda part: part.start or 0):
            if (part.start or 0) > end:
                break
            end = max(end, (part.start or 0) + self.check(path, part))
        if end != math.prod(leaf.shape):
            raise CheckpointError(f"{self.folder}: no part of {path!r} has element {end}; use another step")


def _label(path: str, part: Part) -> str:
    rank, start = part.rank, part.start
    return path + ("" if rank is None else f"@rank-{rank}") + ("" if start is None else f"[{start}]")


class Newest(NamedTuple):
    """The newest step that can be read, what was read of it, and the newer ones that cannot, with the reasons."""

    step: int
    found: Any
    refused: list[tuple[int, str]]


def newest_verified(folder: Folder, read: Callable[[int], Any], steps: Sequence[int]) -> Newest | None:
    """The newest step that can be read, or None where the folder holds no step at all.

    Args:
        read: Reads a step, or raises a CheckpointError.
        steps: All steps, ascending.

    Raises:
        CheckpointError: There are steps, and none can be read; each is named with the reason.
    """
    refused: list[tuple[int, str]] = []
    for step in reversed(steps):
        try:
            return Newest(step, read(step), refused)
        except CheckpointError as error:
            refused.append((step, str(error)))
    if refused:
        reasons = "".join(f"\n  {folder.step_path(step)}: {reason}" for step, reason in refused)
        raise CheckpointError(
            f"{folder.path} holds steps, and none can be read; repair one, or choose another folder to start anew:{reasons}"
        )
    return None
