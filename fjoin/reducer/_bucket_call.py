"""One bucket's call of a hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ..transforms._rider import BucketSums
from ..transforms.layout._pieces import Pieces
from ._aliases import assign_, copy_if_aliased
from ._hook_state import FLAT


class GivesCalls(Protocol):
    """The part of `BucketHook` that a `BucketCall` uses."""

    flat: bool
    fresh: bool

    @property
    def sums_dtype(self) -> torch.dtype: ...

    def update(
        self, grads: Any, state: Any, params: Any, sums: BucketSums, pieces: Pieces | None
    ) -> tuple[Any, Any]: ...


class BucketCall:
    """One bucket's call of the hook in one step."""

    def __init__(
        self,
        run: GivesCalls,
        old: Any,
        params: dict[str, Tensor],
        first: BucketCall | None,
        pieces: Pieces | None = None,
    ) -> None:
        self._run, self._old, self._params, self._pieces, self.done = run, old, params, pieces, False
        self._first = first
        self.sums: BucketSums = BucketSums(run.sums_dtype, None if first is None else first.sums)
        self.state: Any = None
        self.out: Any = None

    def __call__(self, pause: Callable[[], None] | None = None) -> None:
        out, run, first = self.out, self._run, self._first

        def wait_for_first() -> bool:
            """Let the first bucket's call go on, where its sums may be needed before this bucket has sent anything."""
            if first is None or first.done or pause is None:
                return False
            pause()
            return True

        grads = {FLAT: out.grads} if run.flat else out.by_path()
        with self.sums.waiting(wait_for_first):
            new, state = run.update(grads, self._old, self._params, self.sums, self._pieces)
        self.state = copy_if_aliased(state, [out.grads, *self._params.values()])
        if new is None:
            raise ValueError(
                "the hook returned None in the place of gradients; in a train_step every call must give them"
            )
        if self._pieces is not None:
            out.scatter(new[FLAT] if run.flat else out.pack_own(new))
        elif run.flat and run.fresh and new[FLAT].shape == out.grads.shape and new[FLAT].dtype is out.grads.dtype:
            out.grads = new[FLAT]
        else:
            assign_(grads, new)
        if run.flat and not out.scattered:
            out.clear_padding()  # a hook may have left any values there
        self.done = True
        self._first = self._old = None  # the old state is not needed any more

    def wait(self) -> None:
        return None
