"""`TrainState`, its parameters, and how it is loaded."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import optree
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .._errors import DonatedState, TornState
from .._functional import Apply, inner_names
from ..buckets import gather_state, load_params
from ..step import EndStates, HookState, StateData
from ..transforms.base import trees
from ..transforms.optimizers import master_of, with_hyperparameters
from ..transforms.pipelines import PipelineState, by_path
from ._run import Run


def flatten(params: Any) -> tuple[dict[str, Tensor], Callable[[dict[str, Any]], Any]]:
    """Path -> leaf in the order of registration, and the function that rebuilds the tree."""
    if isinstance(params, nn.Module) or (isinstance(params, tuple) and params and isinstance(params[0], Apply)):
        raise TypeError(f"params must be a pytree of tensors, got a {type(params).__name__}{trees.OF_MODULE}")
    if params is None or isinstance(params, Iterator):
        hint = trees.OF_MODULE if params is not None else ""
        raise TypeError(f"params must be a pytree of tensors, such as a dict path -> tensor, got {params!r}{hint}")
    if "jax" in sys.modules:
        from ..jax import to_torch

        params = to_torch(params)
    names, leaves, structure = trees.flatten_in_insertion_order(params)
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ValueError(f"several leaves of params have the paths {twice}; rename them")
    first: dict[int, str] = {}
    for name, leaf in zip(names, leaves, strict=True):
        trees.check_dense(f"params[{name!r}]", leaf)
        if is_traceable_wrapper_subclass(leaf):
            raise TypeError(
                f"params[{name!r}] is a {type(leaf).__name__}, but a step holds plain tensors; a tensor-parallel or fully_shard "
                f"model is trained in a loop over fjoin.join(loader), with its loss times loop.scale"
            )
        if leaf.device != leaves[0].device:
            raise ValueError(
                f"params[{name!r}] lies on {leaf.device}, but params[{names[0]!r}] on {leaves[0].device}; a step takes "
                f"parameters of one device: a model over several is trained in a loop over fjoin.join(loader)"
            )
        if first.setdefault(id(leaf), name) != name:
            raise ValueError(
                f"params[{name!r}] and params[{first[id(leaf)]!r}] are the same tensor, which would become two; pass it once and "
                f"use it twice in loss_fn (fjoin.functional does that for a module's shared parameters)"
            )

    def rebuild(flat: dict[str, Any]) -> Any:
        return optree.tree_unflatten(structure, [flat[name] for name in names])

    return dict(zip(names, leaves, strict=True)), dict if type(params) is dict and names == list(params) else rebuild


def check_values(params: dict[str, Tensor]) -> None:
    """Raise ValueError for parameters on the meta device, which have no values to send to other ranks."""
    if empty := [path for path, p in params.items() if p.is_meta]:
        raise ValueError(
            f"params[{empty[0]!r}] is on the meta device and holds no values; call module.to_empty(device=...) and initialize it first"
        )


def check_buffers(buffers: Any) -> None:
    """Raise TypeError unless `buffers` is None or a dict from paths to tensors."""
    if buffers is None or (isinstance(buffers, dict) and all(isinstance(b, Tensor) for b in buffers.values())):
        return
    raise TypeError(f"buffers must be a dict from paths to tensors, got {buffers!r}")


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
        # The tree of parameters last read, with its leaves and structure at that time.
        self._read: tuple[Any, list[Any], Any] | None = None

    def _claim(self, owner: object = None) -> StateData:
        body = self._body
        if self._read is not None:
            self._check_read(*self._read)
        if owner is not None and body.owner is not owner:
            raise ValueError(
                "this state was made by another train_step's init, or by an earlier init of this step; call init of this step "
                "on its parameters: step.init(state.params)"
            )
        torn = body.ended and body.ended.failed
        if body.torn:
            torn = (
                f"step {body.step} failed after it had changed some of the parameters, so this state is neither old nor "
                f"new; load a checkpoint, or use donate=False to keep the old state whole"
            )
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
        body = self._claim()
        tree = body.rebuild({path: leaf.detach() for path, leaf in body.storage.leaves.items()})
        self._read = tree, *optree.tree_flatten(tree)
        return tree

    def _check_read(self, tree: Any, leaves: list[Any], structure: Any) -> None:
        """Raise TypeError if the tree of parameters that was last read has been changed."""
        now, structure_now = optree.tree_flatten(tree)
        if structure == structure_now and all(a is b for a, b in zip(leaves, now, strict=True)):
            return
        self._read = None  # raise only once
        before, after = (
            dict(zip(map(trees.path_string, optree.treespec_paths(form)), held, strict=True))
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
        body = self._claim()
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
        return TrainState(self._claim().clone())

    __copy__ = clone

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainState:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a TrainState cannot be pickled: it belongs to its step; write fjoin.save(folder, step, state)")

    def replace(self, params: Any = None, buffers: Mapping[str, Tensor] | None = None) -> TrainState:
        """The state with other parameters or buffers, such as pruned ones; that of the optimizer and of all stages
        stays.

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
        body = self._claim()
        if body.window:
            raise ValueError("replace within an accumulation window; call it where metrics.stepped is True")
        given, held_buffers = None if params is None else trees.named_leaves(params), body.buffers or {}
        if buffers is not None and body.buffers is None:
            raise ValueError("replace: buffers were given, but the state has none; pass them to step.init")
        for what, new, old in (("params", given, body.storage.leaves), ("buffers", buffers, held_buffers)):
            shapes = None if new is None else {path: tuple(value.shape) for path, value in new.items()}
            if shapes is not None and shapes != (held := {path: tuple(value.shape) for path, value in old.items()}):
                raise ValueError(f"replace: {what} has {shapes}, expected {held}")
        if given is not None:
            load_params(body.storage, given)
        if buffers is not None:
            body.buffers = {path: buffers[path].detach().to(old, copy=True) for path, old in held_buffers.items()}
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


@torch.no_grad()
def loaded(
    state: TrainState,
    run: Run,
    params: Mapping[str, Tensor],
    pipeline: Any,
    buffers: Mapping[str, Tensor] | None,
    on_buffers: Any,
    batches: int,
) -> TrainState:
    """The state with other values; it takes the memory of the given one.

    Args:
        state: From `init`, of the same pipeline and parameters.
        run: That of its step.
        params: Path -> parameter.
        pipeline: As `TrainState.pipeline` returns it, in memory that nothing else uses.
    """
    body = state.settled(run.token)
    storage, inner = body.storage, pipeline
    if body.outer is not None:
        inner, body.outer = pipeline.inner, pipeline._replace(inner=body.outer.inner)
    assert isinstance(inner, PipelineState)
    leaves = {path: leaf.detach() for path, leaf in storage.leaves.items()}
    for path, leaf in leaves.items():
        leaf.copy_(params[path])
    states = by_path(body.rebuild(leaves), inner.optimizer)
    storage.load_optimizer_states(states)
    if storage.exact:  # a codec sends the changes of this rank's slices, whose exact values are apart
        masters = trees.named_leaves(inner.gather.master)
        for path, own in storage.own_leaves().items():
            value = master_of(states[path])
            own.copy_(masters[path] if value is None else value)
    body.hook = body.hook.split(inner.hook) if isinstance(body.hook, HookState) else inner.hook
    body.ends = EndStates(inner.after, inner.on_state)
    body.gather = getattr(inner.gather, "step", 0)
    body.step = inner.step
    if body.buffers is not None and buffers is not None:
        for path, place in body.buffers.items():
            place.copy_(buffers[path])
        body.buffers_state = on_buffers
    body.batches, body.calls = batches, body.step * run.accumulate
    body.version += 1
    return TrainState(body)


M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def load_into(module: M, params: Any, buffers: Mapping[str, Tensor] | None = None) -> M:
    """Copy parameters and buffers into a module, to evaluate, export or save it as any other module.

    Parameters that the module shares, as tied weights are, are found under any of their names. What is not given keeps
    its values.

    Args:
        module: A module of the form of the one that `functional` took.
        params: A `TrainState`, whose buffers are taken too; or path -> tensor, such as `tx.ema_params(state.params,
            state.pipeline)`.
        buffers: Path -> tensor, with `params` of the second kind.

    Returns:
        The module.

    Raises:
        ValueError: a path that the module does not have, another shape, or two values for one tensor. Nothing is
            changed.
        TypeError: `module` is no module; a value is no tensor; buffers beside a `TrainState`.

    >>> model = torch.nn.Linear(2, 1)
    >>> apply, params, _ = fjoin.functional(model)
    >>> fjoin.load_into(model, {path: torch.zeros_like(p) for path, p in params.items()})(torch.ones(2)).item()
    0.0
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"load_into takes a module and its values, got a {type(module).__name__} as the module")
    if isinstance(params, TrainState):
        if buffers is not None:
            raise TypeError("load_into: a TrainState has its own buffers; pass its params to give others")
        params, buffers = params.params, params.buffers
    given = {**trees.named_leaves(params), **(buffers or {})}
    if not given:
        raise ValueError(f"load_into: there is no value in {params!r}; pass a state, or what functional returned")
    places = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    places |= {name: places[path] for path, name in inner_names(module, places).items()}
    if unknown := sorted(given.keys() - places.keys()):
        raise ValueError(f"load_into: the module has no parameter or buffer {unknown}; it has {list(places)}")
    chosen: dict[int, str] = {}
    for path, value in given.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"load_into: {path!r} is a {type(value).__name__}, expected a tensor")
        place, first = places[path], chosen.setdefault(id(places[path]), path)
        if place.shape != value.shape:
            raise ValueError(f"load_into: {path!r} has shape {tuple(value.shape)}, in the module {tuple(place.shape)}")
        if first != path and not torch.equal(given[first], value):
            raise ValueError(f"load_into: the module shares {first!r} and {path!r}, but their values differ; give one")
    for path in chosen.values():
        places[path].copy_(given[path])
    return module
