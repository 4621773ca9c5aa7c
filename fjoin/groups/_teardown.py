"""The end of process groups, for all that hold them: the meshes, and torch's own objects."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ._axis import AXES, GroupAxis


def destroy(axes: list[GroupAxis], failure: str, process: int) -> None:
    """Destroy the groups of some axes, for all axes: a group that one still held would keep its connections open.

    Args:
        failure: The failure in words, if there was one: messages that will never end may be under way, and peers that
            wait for them get an error at once. Where it is "", NCCL's messages are awaited.
        process: The process that made them. In a forked process the groups have no threads, and are left as they are.
    """
    if process != os.getpid():
        return
    groups = list({id(axis.group): axis.group for axis in axes if axis.group is not None}.values())
    if failure:  # abort all of them first: destroying one waits for its stream
        _abort([group for group in groups if group.name() == "nccl"])
    while groups:
        group = groups.pop()
        for axis in list(AXES):
            if axis.group is group:
                axis.group, axis.failure = None, failure
        _forget(group)
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):
            if group is dist.group.WORLD:
                del group
                dist.destroy_process_group()
            else:
                dist.destroy_process_group(group)


def _abort(groups: list[Any]) -> None:
    """Abort the messages of NCCL's groups, all at the same time: aborting one waits for the device, on which another
    one waits.

    torch's `_group_start` serves for that only where `abort` does not start a thread of its own.
    """

    def abort(group: Any) -> None:
        with contextlib.suppress(RuntimeError):
            group.abort()

    threads = [threading.Thread(target=abort, args=(group,), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _forget(group: Any) -> None:
    """Remove torch's own references to a group, which would keep its connections open.

    - Joinables, modules among them, optimizers and model averagers hold it as an attribute, and a module's reducer
      holds it in C++. If the reducer were the last holder, its destructor would wait for threads that wait for Python.
    - The functions of torch.distributed.nn hold the default group at the time of their import among their default
      arguments, and making a DistributedDataParallel imports them.
    """
    kinds = (Joinable, ModelAverager, Optimizer)
    places = gc.get_referrers(group)  # objects, or their dicts
    # Each search for referrers takes some 30 ms, so not for torch's own dicts, in which groups are keys.
    dicts = [place for place in places if isinstance(place, dict) and any(value is group for value in place.values())]
    owners = [one for place in dicts for one in gc.get_referrers(place)]
    for holder in [one for one in (*places, *owners) if issubclass(type(one), kinds)]:
        held = [name for name, value in vars(holder).items() if value is group]
        vars(holder).update(dict.fromkeys(held))
        if held and isinstance(holder, DistributedDataParallel):
            vars(holder).update(reducer=None, logger=None)
    module = sys.modules.get("torch.distributed.nn.functional")
    for function in vars(module).values() if module else ():
        defaults = getattr(function, "__defaults__", None)
        if defaults and any(value is group for value in defaults):
            function.__defaults__ = tuple(None if value is group else value for value in defaults)
