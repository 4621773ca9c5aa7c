"""The state of a training run, which a step takes and returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optree
import torch
from torch import Tensor

from ..._errors import DonatedState, TornState
from ...buckets._gather_pieces import gather_state
from ...buckets._load_params import load_params
from ...transforms.optimizers.wrappers._inject import with_hyperparameters
from ...transforms.pipelines._tree_memory import PipelineState
from ...transforms.tree._tree import named_leaves, path_string
from ._state_data import StateData


class TrainState:
    """Parameters, optimizer state, buffers and counters; made by `step.init`, renewed by `step`.

    A step takes the memory of the state it is given, as with JAX's donate_argnums: the old state
    cannot be used afterwards. Tensors taken out of it are views that the next step overwrites;
    `clone` makes copies to keep. Where only some tensors are saved, save copies of them, `tensor.clone()`: a file
    gets the whole memory that a view is of.

    Each read of `state.params` makes new containers, such as a dict, which no step reads: the next use of the state
    detects an assigned entry. Write into the tensors, or start from other tensors by `step.init`.

    Raises:
        TypeError: on the next use after an entry of `state.params` has been assigned or deleted; where it is pickled.
        DonatedState, TornState: on any use after a step has taken it, or has failed while changing it.

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
            None  # the tree of parameters last read, with its leaves and structure at that time
        )

    def _claim(self, owner: object = None) -> StateData:
        body = self._body
        self._check_read()
        if owner is not None and body.owner is not owner:
            raise ValueError(
                "this state was made by another train_step's init, or by an earlier init of this step; call init of this step "
                "on its parameters: step.init(state.params)"
            )
        torn = body.torn or (body.ended and body.ended.failed)
        if torn or (owner is not None and body.lost):
            raise TornState(torn or body.lost, step=body.step)
        # A lost window has overwritten nothing: the states given to its calls are the state of the last completed step.
        if self._version != body.version and not (body.lost and self._version >= body.version_before):
            step = body.step if body.window else body.step - 1
            raise DonatedState(
                f"this state was donated to step {step}, which has overwritten it; use the state that the step "
                f"returned (`state, metrics = step(state, batch)`), keep `state.clone()`, or pass donate=False to train_step",
                step=body.step,
            )
        return body

    def _writable(self) -> StateData:
        """The data, once no thread reads it, for a user who may write into the parameters."""
        body = self._claim()
        body.storage.readers.wait()
        return body

    def settled(self, owner: object) -> StateData:
        """The data of a completed step, to be saved or replaced.

        Raises:
            ValueError: it is within an accumulation window.
        """
        body = self._claim(owner)
        if body.window:
            raise ValueError("the state is within an accumulation window; save where metrics.stepped is True")
        return body

    @property
    def params(self) -> Any:
        """The parameters, in the tree given to `init`: views that the next step overwrites."""
        body = self._writable()
        tree = body.rebuild({path: leaf.detach() for path, leaf in body.storage.leaves.items()})
        self._read = tree, *optree.tree_flatten(tree)
        return tree

    def _check_read(self) -> None:
        """Raise TypeError if the tree of parameters that was last read has been changed."""
        if self._read is None:
            return
        tree, leaves, structure = self._read
        now, structure_now = optree.tree_flatten(tree)
        if structure == structure_now and all(a is b for a, b in zip(leaves, now, strict=True)):
            return
        self._read = None  # raise only once
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
        """The buffers that the last `loss_fn` returned, as transformed by `on_buffers`; or None."""
        return self._claim().buffers

    @property
    def pipeline(self) -> Any:
        """The pipeline's state in the form of `pipeline.init` and `pipeline.step`: keyed by path, in views."""
        body = self._writable()
        window = torch.as_tensor(body.window.get("weight", 0.0), dtype=torch.float64)
        optimizer = body.rebuild(body.storage.optimizer_states())
        gather = gather_state(body.storage, body.gather)
        state = PipelineState(body.hook_state(), optimizer, *body.ends, body.step, window, gather)
        return state if body.outer is None else body.outer._replace(inner=state)

    @property
    def on_buffers(self) -> Any:
        """The state of the transform `on_buffers`; () without one."""
        return self._claim().buffers_state

    @property
    def step(self) -> int:
        """The number of steps taken."""
        return self._claim().step

    @property
    def batches(self) -> int:
        """The number of batches that this rank has consumed in all calls: the position at which to resume its loader.

        After a call that failed within an accumulation window, the number up to the last completed step.
        """
        return self._claim().batches

    def clone(self) -> TrainState:
        """A copy in memory of its own, which steps of this state do not overwrite."""
        return TrainState(self._writable().clone())

    def __copy__(self) -> TrainState:
        return self.clone()

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainState:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a TrainState cannot be pickled, since it belongs to its step and its ranks; write fjoin.save(folder, step, state)"
        )

    def replace(self, params: Any = None, buffers: Mapping[str, Tensor] | None = None) -> TrainState:
        """The state with other parameters or buffers, such as pruned ones; that of the optimizer and of all stages stays.

        All ranks must do the same. The new state takes this state's memory, as a step does.

        Args:
            params: A tree like `state.params`; None: as they are.
            buffers: Path -> tensor, all of them; None: as they are.

        Returns:
            The new state, to use from now on.

        Raises:
            ValueError: other paths or shapes; the state is within an accumulation window.

        >>> from fjoin import transforms as tx
        >>> step = fjoin.train_step(lambda p, x: (p["w"] * x).sum(), tx.fuse(tx.mean("data"), tx.sgd(0.5)))
        >>> state = step.init({"w": torch.ones(2)})
        >>> state.replace(params={"w": torch.tensor([5.0, 6.0])}).params["w"]
        tensor([5., 6.])
        """
        body = self._writable()
        if body.window:
            raise ValueError("replace within an accumulation window; call it where metrics.stepped is True")
        given = None if params is None else named_leaves(params)
        if buffers is not None and body.buffers is None:
            raise ValueError("replace: buffers were given, but the state has none; pass them to step.init")
        for what, new, old in (("params", given, body.storage.leaves), ("buffers", buffers, body.buffers or {})):
            shapes = None if new is None else {path: tuple(value.shape) for path, value in new.items()}
            if shapes is not None and shapes != (held := {path: tuple(value.shape) for path, value in old.items()}):
                raise ValueError(f"replace: {what} has {shapes}, expected {held}")
        if given is not None:
            load_params(body.storage, given)
        if buffers is not None:
            old_ones = body.buffers or {}
            body.buffers = {path: buffers[path].detach().to(old, copy=True) for path, old in old_ones.items()}
        body.version += 1
        return TrainState(body)

    def with_hyperparameters(self, **values: float) -> TrainState:
        """The state with other hyperparameters, for an optimizer that is wrapped in `inject_hyperparameters`.

        All ranks must do the same. The new state takes this state's memory, as a step does.

        Args:
            values: Name -> value, for all parameters whose optimizer has this hyperparameter.

        Returns:
            The new state, to use from now on.

        Raises:
            ValueError: no optimizer has a hyperparameter of this name (the message lists the existing ones), or a value
                is not finite.
            TypeError: a value that is no number.
        """
        body = self._claim()
        body.storage.readers.wait()
        body.storage.set_slots(with_hyperparameters(body.storage.slots, **values))
        body.version += 1
        return TrainState(body)

    def __repr__(self) -> str:
        body = self._body
        how = "torn" if body.torn else "donated" if body.version != self._version else f"step={body.step}"
        return f"TrainState({len(body.storage.leaves)} parameters, {how})"


def check_state(state: Any) -> TrainState:
    """The given state; raises TypeError if it is none."""
    if not isinstance(state, TrainState):
        raise TypeError(f"state must be a TrainState from step.init or the last step, got a {type(state).__name__}")
    return state
