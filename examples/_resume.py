"""Checkpoints in the examples: a folder that all ranks see, and the demo's check of a run that goes on from one."""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from _checks import Report, digest
from torch import Tensor

import fjoin


@contextlib.contextmanager
def common_folder(parent: pathlib.Path | None = None) -> Iterator[str]:
    """A temporary folder, the same on all ranks, which must be on one file system; deleted at the end."""
    with contextlib.ExitStack() as stack:
        found: list[Any] = [None]
        if not dist.is_initialized() or dist.get_rank() == 0:
            found = [stack.enter_context(tempfile.TemporaryDirectory(dir=parent))]
        if dist.is_initialized():
            dist.broadcast_object_list(found)
        yield found[0]
        if dist.is_initialized():
            dist.barrier()  # all have read it


def assert_same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Fail unless two runs have ended with the same parameters."""
    assert a.keys() == b.keys()
    for path, value in a.items():
        assert torch.equal(value, b[path]), f"{path} of the resumed run differs by {(value - b[path]).abs().max():.1e}"


def equal_to_uncut(
    report: Report,
    make_step: Callable[[], fjoin.TrainStep],
    params: dict[str, Tensor],
    folder: str,
    loader: list[Any],
    state: fjoin.TrainState,
) -> None:
    """Check that a new step that goes on from the checkpoint ends with the bits of the run that was not stopped.

    Args:
        params: Only their names, shapes and dtypes are used.
        loader: All of this rank's batches.
        state: Of the other run, at its end.
    """
    step = make_step()
    like = {path: torch.zeros_like(p) for path, p in params.items()}
    again = fjoin.Checkpoints(folder, step).restore(like, data=False)
    first = again.step
    for batch in step.join(loader[again.batches :]):
        again, _ = step(again, batch)
    digests = [digest((one.params, one.pipeline.optimizer)) for one in (again, state)]
    report.check(
        f"resumed after step {first} in a new train_step: parameters and optimizer state equal to the bit",
        digests[0] == digests[1] and again.step == state.step > first > 0,
        f"{digests[0][:12]} and {digests[1][:12]} after step {again.step}",
    )
    step.close()
