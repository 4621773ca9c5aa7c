"""The leaves of a checkpoint."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from .._errors import CheckpointError
from ._files import DAMAGED, DTYPES, TensorFile, typed_errors
from ._manifest import OWN_FILES, Leaf, LeafPart, Manifest


class SavedLeaves:
    """The leaves of one step's folder. Files are opened when a leaf of them is read first, and each byte is checked
    once.

    Args:
        folder: The step's folder.
        manifest: Its manifest.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._files: dict[int, TensorFile] = {}

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

    def part(self, path: str, part: LeafPart, memory: Tensor | None = None) -> Tensor:
        """A part of a leaf: the whole shape, or of a piece its elements, (n,). In the leaf's dtype.

        Args:
            memory: As for `TensorFile.read`.

        Raises:
            CheckpointError: The file does not hold it, in this shape and dtype, or is damaged.
        """
        self.check(path, part)
        stored = self.file(part.file).read(part.name, memory)
        return torch.view_as_complex(stored) if self.manifest.leaves[path].dtype == "complex128" else stored

    def check(self, path: str, part: LeafPart) -> int:
        """Compare a part's shape and dtype with its leaf, without reading it. Returns the number of its elements."""
        leaf, file = self.manifest.leaves[path], self.file(part.file)
        dtype, shape, _ = file.span(part.name)
        stored, pair = (torch.float64, (2,)) if leaf.dtype == "complex128" else (DTYPES[leaf.dtype], ())
        own = shape[: len(shape) - len(pair)]
        fits = list(own) == leaf.shape if part.start is None else len(own) == 1
        fits = fits and _begin(part) + math.prod(own) <= math.prod(leaf.shape)
        if not fits or (dtype, shape) != (stored, own + pair):
            found, form = f"{dtype} {list(shape)}", f"{leaf.dtype} {leaf.shape}"
            where = f"{file.path}: {part.name!r}, a part of {path!r} from element {_begin(part)} on"
            raise CheckpointError(f"{where}, is {found}, which does not fit {form}; {DAMAGED}")
        return math.prod(own)

    def between(
        self, path: str, parts: Sequence[LeafPart], start: int, stop: int, memory: Tensor | None = None
    ) -> Tensor:
        """The elements from `start` to `stop` of a flat leaf, of which some parts are read.

        Args:
            memory: As for `part`, which takes it where one part holds just these elements.

        Raises:
            CheckpointError: the parts do not hold them.
        """
        out, at = torch.empty(stop - start, dtype=DTYPES[self.manifest.leaves[path].dtype]), start
        for part in sorted(parts, key=_begin):
            first, end = _begin(part), _begin(part) + self.check(path, part)
            if (first, end) == (start, stop):
                return self.part(path, part, memory)
            if first <= at < min(end, stop):
                until = min(end, stop)
                out[at - start : until - start] = self.part(path, part)[at - first : until - first]
                at = until
        if at != stop:
            raise CheckpointError(f"no part of {path!r} holds the elements from {at} to {stop}; use another step")
        return out

    def whole(self, path: str) -> Tensor:
        """A leaf that all ranks have, or whose pieces make a whole.

        Raises:
            CheckpointError: the ranks have values of their own.
        """
        leaf = self.manifest.leaves[path]
        if len({*map(_begin, leaf.parts)}) < len(leaf.parts):
            text = f"{self.folder}: {path!r} has values of {len(leaf.parts)} ranks, expected one"
            raise CheckpointError(f"{text}; average them first")
        return self.between(path, leaf.parts, 0, math.prod(leaf.shape)).reshape(leaf.shape)

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
        for part in sorted(leaf.parts, key=_begin):
            if _begin(part) > end:
                break
            end = max(end, _begin(part) + self.check(path, part))
        if end != math.prod(leaf.shape):
            raise CheckpointError(f"{self.folder}: no part of {path!r} has element {end}; use another step")


def _begin(part: LeafPart) -> int:
    return part.start or 0
