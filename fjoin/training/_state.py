"""What a training step takes and returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import optree
import torch
from torch import Tensor

from .._errors import DonatedState, TornState
from ..reducer._flat_params import Storage
from ..reducer._hook_state import HookState
from ..transforms._tree import path_string
from ..transforms.optimizers._inject import with_hyperparameters
from ..transforms.pipelines._fuse import PipelineState


@dataclass
class StateData:
    """The memory behind a state. Steps change it in place; `version` says whose it is now."""

    storage: Storage
    buffers: dict[str, Tensor] | None
    hook: Any
    after: Any
    rebuild: Callable[[dict[str, Any]], Any]  # path -> leaf, to the tree that the user gave
    owner: object  # the step that made it, which alone can run it
    buffers_state: Any = ()  # of the transform of the buffers
    buffers_before: dict[str, Tensor] | None = None  # this step's first forward pass
    batches_before: int = 0  # this step's first call
    version_before: int = 0  # of the state given to this step's first call
    step: int = 0  # steps taken
    batches: int = 0  # consumed on this rank
    calls: int = 0  # calls of the step, more than steps where gradients are accumulated
    window: dict[str, Any] = field(default_factory=dict)  # lane sums of an open window
    unit: float = 1.0  # what the gradients of this window are multiplied with while they are summed
    version: int = 0
    torn: str = ""
    lost: str = ""  # why the window that was open is lost: nothing else is, so that the state can still be read
    outer: Any = None  # where the pipeline leaves steps out, its own state, without that of what it runs

    def hook_state(self) -> Any:
        """The hook's state; after a plain reduction it is made only when it is asked for."""
        if callable(self.hook):
            self.hook = self.hook()
        return self.hook.whole() if isinstance(self.hook, HookState) else self.hook

    def lose_window(self, calls: int) -> None:
        """Forget the micro-batches of an open window: the state is again that of the last completed step."""
        self.window, self.calls = {}, calls
        self.buffers, self.batches = self.buffers_before, self.batches_before
        self.storage.clear_grads()

    def clone(self) -> StateData:
        buffers = None if self.buffers is None else {k: b.clone() for k, b in self.buffers.items()}
        return replace(
            self, storage=self.storage.clone(), buffers=buffers, window=dict(self.window), version=0, lost=""
        )


class TrainState:
    """Parameters, optimizer state, buffers and counters; made by `step.init`, renewed by `step`.

    A step takes the memory of the state it is given, as with JAX's donate_argnums: the old state
    cannot be used afterwards. Tensors taken out of it are views that the next step overwrites;
    `clone` keeps them.

    The containers in `state.params`, such as a dict, are made for whoever reads them, and no step looks at them: an entry that is
    assigned is noticed at the next use of the state. Write into the tensors, or start from other ones by `step.init`.

    Raises:
        TypeError: on the next use after an entry of `state.params` has been assigned or deleted.
        DonatedState, TornState: on any use after a step has taken it, or has failed in changing it.

    >>> from fjoin import transforms as tx
    >>> step = fjoin.train_step(lambda p, batch: (p["w"] * batch).sum(), tx.fuse(tx.mean("data"), tx.sgd(0.5)))
    >>> state = step.init({"w": torch.ones(2)})
    >>> kept = state.clone()
    >>> state, _ = step(state, torch.tensor([1.0, 2.0]))
    >>> kept.params["w"], state.params["w"], state.step
    (tensor([1., 1.]), tensor([0.5000, 0.0000]), 1)
    """

    __slots__ = ("_body", "_read", "_version")

    def __init__(self, body: StateData) -> None:
        self._body, self._version = body, body.version
        self._read: tuple[Any, list[Any], Any] | None = (
            None  # the tree of parameters last read; its leaves and structure then
        )

    def _claim(self, owner: object = None) -> StateData:
        body = self._body
        self._check_read()
        if owner is not None and body.owner is not owner:
            raise ValueError(
                "this state was made by another train_step's init, or by an earlier init of this step; call init of this step "
                "on its parameters: step.init(state.params)"
            )
        if body.torn or (owner is not None and body.lost):
            raise TornState(body.torn or body.lost, step=body.step)
        # A window that is lost has overwritten nothing: the states given to its calls are that of the last completed step.
        if self._version != body.version and not (body.lost and self._version >= body.version_before):
            step = body.step if body.window else body.step - 1
            raise DonatedState(
                f"this state was donated to step {step}, which has overwritten it; use the state that the step "
                f"returned (`state, metrics = step(state, batch)`), keep `state.clone()`, or pass donate=False to train_step",
                step=body.step,
            )
        return body

    @property
    def params(self) -> Any:
        """The parameters, in the tree given to `init`: views that the next step overwrites."""
        body = self._claim()
        tree = body.rebuild({path: leaf.detach() for path, leaf in body.storage.leaves.items()})
        self._read = tree, *optree.tree_flatten(tree)
        return tree

    def _check_read(self) -> None:
        """Raise TypeError if the tree of parameters that was last read is no longer what it was."""
        if self._read is None:
            return
        tree, leaves, structure = self._read
        now, structure_now = optree.tree_flatten(tree)
        if structure == structure_now and all(a is b for a, b in zip(leaves, now, strict=True)):
            return
        self._read = None  # said once
        before, after = (
            dict(zip(map(path_string, optree.treespec_paths(form)), held, strict=True))
            for form, held in ((structure, leaves), (structure_now, now))
        )
        changed = next((path for path in {**before, **after} if before.get(path) is not after.get(path)), "")
        raise TypeError(
            f"state.params was changed: {changed!r} was assigned or deleted, but no step looks at this container, which is made for "
            f"whoever reads it; write into the tensor, state.params[{changed!r}].copy_(value), on all ranks alike, start from "
            f"other parameters by step.init(params), or change a copy of it, dict(state.params)"
        )

    @property
    def buffers(self) -> dict[str, Tensor] | None:
        """The buffers as the last `loss_fn` returned them, or None."""
        return self._claim().buffers

    @property
    def pipeline(self) -> Any:
        """The pipeline's state as `pipeline.init` and `pipeline.step` have it: keyed by path, in views."""
        body = self._claim()
        window = torch.as_tensor(body.window.get("weight", 0.0), dtype=torch.float64)
        optimizer = body.rebuild(body.storage.optimizer_states())
        state = PipelineState(body.hook_state(), optimizer, body.after, body.step, window)
        return state if body.outer is None else body.outer._replace(inner=state)

    @property
    def step(self) -> int:
        """Steps taken."""
        return self._claim().step

    @property
    def batches(self) -> int:
        """Batches that this rank has consumed, in all calls so far: where to go on in its loader.

        After a call that failed within an accumulation window: those up to the last completed step.
        """
        return self._claim().batches

    def clone(self) -> TrainState:
        """A copy in memory of its own, which no step has overwritten."""
        return TrainState(self._claim().clone())

    def with_hyperparameters(self, **values: float) -> TrainState:
        """The state with other hyperparameters, for an optimizer that is wrapped in `inject_hyperparameters`.

        All ranks must do the same. This state's memory is taken over, as by a step.

        Args:
            values: Name -> value, for all parameters whose optimizer has this hyperparameter.

        Returns:
            The state to go on with.

        Raises:
            ValueError: no optimizer has a hyperparameter of this name; the message lists what there is. A value that is not finite.
            TypeError: a value that is no number.
        """
        body = self._claim()
        body.storage.set_slots(with_hyperparameters(body.storage.slots, **values))
        body.version += 1
        return TrainState(body)

    def __repr__(self) -> str:
        body = self._body
        how = "torn" if body.torn else "donated" if body.version != self._version else f"step={body.step}"
        return f"TrainState({len(body.storage.leaves)} parameters, {how})"
