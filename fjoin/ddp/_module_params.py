"""The parameters of a registered module in its steps, and what its backward passes tell of them."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..groups import Communicator
from ..optim import ForeachStepper
from ..records import Record
from ..step import EndStates, init_ends
from ..transforms.base import trees
from ..transforms.layout import Bucket, Pieces
from ..transforms.optimizers import Optimizer, StepItem, compared, master_of
from ..transforms.pipelines import Pipeline, Sharding


class UsedParameters:
    """Records the parameters that get a gradient, on this rank and on the others.

    Args:
        params: Path -> parameter.
        mesh: The ranks.
    """

    def __init__(self, params: Mapping[str, Tensor], mesh: Communicator) -> None:
        self._record = Record(mesh, tuple(mesh.shape), list(params), small=True)
        self._here = here = set[str]()
        for path, p in params.items():
            p.register_post_accumulate_grad_hook(lambda _, path=path: here.add(path))  # type: ignore[misc]

    def anywhere(self) -> set[str]:
        """The parameters that have had a gradient on some rank since the last call; sends one small message."""
        bits = {path: float(path in self._here) for path in self._record.names}
        self._here.clear()
        return {path for path, bit in self._record.send(bits).wait().items() if bit}


class ScaledLoss:
    """Scales losses, and detects backward passes of losses that were not scaled.

    Attributes:
        missed: Whether a pass since the last step came from a loss that was not scaled.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.missed: bool = False
        self._running: Callable[[], _Pass | None] = lambda: None
        me = weakref.ref(self)

        def arrived(_: Tensor) -> None:
            scaling = me()
            if scaling is not None:
                scaling.check()

        for p in params:
            p.register_post_accumulate_grad_hook(arrived)

    def __call__(self, loss: Tensor, scale: Tensor) -> Tensor:
        """The loss times its scale, with a hook that marks its backward pass as running."""
        scaled = loss * scale.to(loss.device)

        def begins(grad: Tensor) -> None:
            # Only the pass holds this object, until it ends or fails. Nested passes, of checkpoints, are part of it.
            running = _Pass()
            self._running = weakref.ref(running)
            torch.autograd.Variable._execution_engine.queue_callback(running)  # type: ignore[attr-defined]

        scaled.register_hook(begins)
        return scaled

    def check(self) -> None:
        """Record whether the current backward pass comes from a scaled loss; called in every backward pass."""
        self.missed = self.missed or self._running() is None

    def take_error(self) -> RuntimeError | None:
        """The error to raise in this step, or None; clears `missed`."""
        missed, self.missed = self.missed, False
        if not missed:
            return None
        return RuntimeError(
            "the pipeline takes gradients of a scaled loss, and a backward pass since its last step had none; write "
            "handle.scale(loss).backward(), under no_sync too. This step is left out; call zero_grad()"
        )


class _Pass:
    """A backward pass of a scaled loss."""

    def __call__(self) -> None: ...


# By the size of an element in bytes: a dtype whose sums are exact.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class ModuleParams:
    """A module's own parameters, where they are, and the states of their optimizer: what `Step` needs of a `Storage`.

    Attributes:
        leaves: Path -> parameter.
        flats: The parameters' memory, which the states of pure functions must not share.
        layout: The buckets of the last pass; before any pass those of the first.
        stepper: Steps parameters; holds the optimizer's states.
        gather: The state of the gather, for a pipeline that shards.

    Args:
        pieces: The pieces that ranks own, for a pipeline that shards.
    """

    def __init__(self, leaves: dict[str, Tensor], pieces: Pieces | None, layout: tuple[Bucket, ...]) -> None:
        self.leaves, self.pieces, self.layout = leaves, pieces, layout
        self.flats: list[Tensor] = [p.detach() for p in leaves.values()]
        self.exact: list[Tensor] = []
        self.shapes: dict[str, torch.Size] = {path: p.shape for path, p in leaves.items()}
        self.float16: bool = any(p.dtype is torch.float16 for p in leaves.values())
        self.stepper: ForeachStepper = ForeachStepper()
        self._watched: list[StepItem] = []
        self._sharding: Sharding | None = None
        self.gather: Any = ()
        self._own: dict[str, Tensor] = {}

    def init(self, pipeline: Pipeline) -> EndStates:
        """Make the states of a pipeline's optimizer; returns those of the transforms behind it."""
        held = {path: p.detach() for path, p in self.leaves.items()}
        for path, p in held.items():
            trees.check_dense(f"parameter {path!r}", p)
        pipeline.check(held)
        own, at = held if self.pieces is None else self.pieces.own(held), pipeline.optimizer.at
        items: list[StepItem] = [(path, at(path), p, None) for path, p in own.items()]
        self.stepper.begin(items)
        slots = self.stepper.states
        self._watched = [item for item in items if compared(item[1], slots[item[0]])]
        self._sharding = pipeline.sharding
        if self.pieces is not None and pipeline.sharding is not None:
            self.gather = pipeline.sharding.init(self.pieces, own, dict(slots))
        return init_ends(pipeline, own, slots, self.flats)

    @property
    def compares(self) -> bool:
        """Whether there are hyperparameters that may differ between ranks."""
        return bool(self._watched)

    @property
    def has_masters(self) -> bool:
        return any(master_of(state) is not None for state in self.stepper.states.values())

    def check_rates(self) -> list[tuple[str, float]]:
        """The hyperparameters of the next step that may differ between ranks, by name."""
        return self.stepper.check_rates(self._watched)

    def begin(self) -> None:
        """Begin a pass, in which `own_leaves` gives the same tensors."""
        self._own = {}

    def own_leaves(self) -> dict[str, Tensor]:
        """Path -> the values that this rank steps: parameters, or slices of them.

        Some slices are copies, which the gather gives to the parameters.
        """
        if not self._own:
            held = {path: p.detach() for path, p in self.leaves.items()}
            if self.pieces is not None and self._sharding is not None:
                held = self._sharding.held(self.pieces, held, self.gather)
            self._own = held
        return self._own

    def optimizer_states(self) -> dict[str, Any]:
        """Path -> the state of the parameter, or of this rank's slice."""
        return dict(self.stepper.states)

    def checksum(self) -> int:
        """A checksum of the parameters."""
        words = (p.detach().reshape(-1).view(_WORDS[p.itemsize]) for p in self.leaves.values())
        return zlib.crc32(repr([int(each.sum(dtype=torch.int64)) for each in words]).encode())

    def load_states(self, saved: Mapping[str, Any], at: Callable[[str], Optimizer]) -> None:
        """Take the optimizer's states, by path and by name.

        Raises:
            ValueError: they are of other parameters, or of another optimizer.
        """
        if self.stepper.states.keys() != saved.keys():
            raise ValueError(
                f"the optimizer's state is of {sorted(saved)}, the module has {sorted(self.stepper.states)}"
            )
        self.begin()
        own = self.own_leaves()
        self.stepper.adopt(self.stepper.prepared((path, at(path), own[path], s) for path, s in saved.items()))
