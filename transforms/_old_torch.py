"""What supported versions of torch lack, and newer ones have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._devices import guard_of_fake_tensors

_IS_OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
HAS_CONSTANT_MODULES = not _IS_OLD  # whether functions that run while torch.compile traces get modules
TRACES_STRUCTURES = not _IS_OLD  # whether torch.compile traces comparisons of structures of trees
_LIBRARY: Any = None  # its rules hold as long as it is referred to


def complete() -> None:
    """Do once what torch before 2.13 does not."""
    global _LIBRARY
    if _LIBRARY is not None or not _IS_OLD:
        return
    # A FakeTensorMode does this at its first use; if that is in a thread, the next one crashes once the thread has ended.
    guard_of_fake_tensors()
    try:  # whether torch.func.vmap has a rule for this
        torch.func.vmap(lambda x: x.view(torch.int32))(torch.ones(1, 1))
        _LIBRARY = True
    except RuntimeError:
        _LIBRARY = torch.library.Library("aten", "IMPL")
        _LIBRARY.impl("view.dtype", _view_dtype, "FuncTorchBatched")


def _view_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

    functorch, keys = torch._C._functorch, torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched)
    level = retrieve_current_functorch_interpreter().level()
    inner, dim = functorch._unwrap_batched(x, level)
    with torch._C._ExcludeDispatchKeyGuard(keys):  # so that the next level sees the call
        out = inner.view(dtype)
    return out if dim is None else functorch._add_batch_dim(out, dim, level)
