"""The sharded reduction: of each bucket every rank gets the sum of its own piece; the record travels alone."""

from __future__ import annotations

from typing import Any

from ..agreement._step_record import StepRecord
from ..buckets._flat_params import Storage
from ..buckets._grad_buffer import GradBuffer
from ..groups.axes._malloc import keep_freed
from ..transforms._axis_env import Axis, Work
from ..transforms._piece_sum import PieceSum
from ..transforms.layout._bound_pieces import bind_pieces
from ._all_reduce import AllReduceHook


class ReduceScatterHook(AllReduceHook):
    """Runs a hook that begins with `scatter_mean` and contains no further reduction."""

    carries_record = False

    def init(self, storage: Storage) -> Any:
        """The initial state."""
        keep_freed()
        with bind_pieces(storage.pieces):
            return super().init(storage)

    def start(self, state: Any, storage: Storage, record: StepRecord, values: dict[str, Any], step: int) -> None:
        self._under_way: list[Scatter] = []
        super().start(state, storage, record, values, step)

    def launch(self, index: int, out: GradBuffer) -> Work:
        while self._under_way and self._under_way[0].arrived():  # so that its gradients can be freed
            self._under_way.pop(0).wait()
        self._under_way.append(Scatter(out, self._mesh.axes[self._axes[0]]))
        return self._under_way[-1]

    def stop(self) -> None:
        """Discard a step that has failed."""
        self._under_way = []
        super().stop()


class Scatter:
    """The message of one bucket, which leaves this rank the sum of its piece.

    Attributes:
        total: After the wait: the sum of the elements of all pieces, where the transport has computed it.
    """

    def __init__(self, out: GradBuffer, axis: Axis) -> None:
        assert out.pieces is not None
        self._out = out
        self.total: float | None = None
        self._work: PieceSum | None = axis.begin_scatter(out.buffer, out.pieces.bounds[0], out.pieces.rank)

    def arrived(self) -> bool:
        """Whether a wait would not wait."""
        return self._work is None or self._work.arrived()

    def wait(self) -> None:
        """Take the sum."""
        if self._work is not None:
            self._out.scatter(self._work.wait())
            self.total, self._work = self._work.total, None
            if self._out.direct:
                self._out.buffer = self._out.grads
