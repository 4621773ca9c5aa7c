"""Processes of loaders beside jax."""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

from torch.utils.data import DataLoader


def refuse_fork(loader: Any) -> None:
    """Raise where a loader would fork this process while threads of jax run in it, in whose copies locks may stay taken for ever.

    Raises:
        ValueError: naming what to pass to the DataLoader.
    """
    used = sys.modules.get("jax._src.xla_bridge")
    if not isinstance(loader, DataLoader) or not loader.num_workers or used is None:
        return
    method = getattr(loader.multiprocessing_context, "get_start_method", multiprocessing.get_start_method)()
    # jax has no public question whether it runs already. Without this one it counts as running.
    if method == "fork" and getattr(used, "backends_are_initialized", lambda: True)():
        raise ValueError(
            f"this DataLoader would fork {loader.num_workers} workers, and jax runs in this process, whose threads hold locks that no "
            f"one in a worker would free; pass DataLoader(..., multiprocessing_context='forkserver'), with a dataset that can be pickled"
        )
