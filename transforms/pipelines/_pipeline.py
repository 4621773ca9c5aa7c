"""`Pipeline`; the effect of a step; donated states; rates that ranks compare."""

from __future__ import annotations

import itertools
import math
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import optree
import torch
from torch import Tensor

from .. import base
from ..axes import all_gather, axis_size, psum
from ..base import Call, DesyncError, DonatedState, Number, Spec, State, Totals, Transform, Tree, shares, specs, trees
from ..optimizers import Optimizer, check_rates, compared, states_of
from ._plan import Parts, axes_of
from ._sharded import Sharding

# A bool where the host knows it, a 0-d bool tensor otherwise.
Flag: TypeAlias = "bool | Tensor"


class Effect:
    """The effect of a step on this rank.

    Attributes:
        any_live: At least one of the ranks that share the gradients has weight.
        fine: The gradients may be used.
        raises: A flag of the device: the host will raise for this step later, so nothing may change.
        steps: Whether the optimizer takes a step.
    """

    __slots__ = ("fine", "any_live", "raises", "steps")

    def __init__(self, any_live: Flag, fine: Flag = True, raises: Flag = False) -> None:
        self.any_live, self.fine, self.raises = any_live, fine, raises
        if any_live is False or fine is False:
            self.steps: Flag = False
        else:
            self.steps = fine if any_live is True else any_live if fine is True else any_live & fine

    @property
    def at_end(self) -> Effect:
        """The effect for transforms at the end of the step, which run although the optimizer took none."""
        return Effect(True if self.raises is False else ~torch.as_tensor(self.raises))

    def keep(self, new: Any, old: Any) -> Any:
        """The state after the step, or the state before it with advanced host counters.

        Each argument may be a function that returns the state; see `choose_state`.
        """
        if self.steps is True:
            return new() if callable(new) else new
        return trees.choose_state(torch.as_tensor(self.steps), new, old)

    def where(self, new: Tree, old: Tree) -> Tree:
        """The tensors after the step, or the tensors before it, leaf by leaf."""
        if isinstance(self.steps, Tensor):
            return trees.where(self.steps, new, old)
        return new if self.steps else old

    def update_counters(self, skips: Any, outer: Any) -> Any:
        """The state around a pipeline that skips steps, after this step: it counts the step, unless no rank had input."""
        if self.any_live is False:
            return outer
        counted = skips.update_counters(outer, torch.as_tensor(self.fine))
        return counted if self.any_live is True else trees.choose_state(self.any_live, counted, outer)

    def weight(self, weight: Any) -> Any:
        """The weight of this step in an average over steps: 0 for a step without effect."""
        if isinstance(self.steps, Tensor):
            weight = trees.to_device(self.steps.device, shares.check_weight(weight))
            return torch.where(self.steps, weight, torch.zeros_like(weight))
        return weight if self.steps else 0.0

    def after(
        self, transform: Transform, values: Tree, state: State, call: Call, params: Tree = None
    ) -> tuple[Tree, State]:
        """Transform the parameters, the buffers, or the optimizer's state, at the end of each step, those without
        effect included.

        Args:
            call: The call, with the weight of this step and the number of the steps before it.
            params: The parameters, where `values` are others.
        """
        at_end = call.inside(weight=self.weight(call.weight), persistent=True)
        run = partial(transform.run, values, state, values if params is None else params, at_end)
        if self.raises is False:
            return run()
        return trees.choose_state(~torch.as_tensor(self.raises), run, (values, state))


def zero_unless_live(call: Call, grads: Tree) -> Tree:
    """The gradients, or zeros for a rank without weight: some of them stay its own, though ranks step together."""
    weight = call.totals().weight
    if isinstance(weight, float):
        return grads if weight else trees.zeros_like(grads)
    return trees.where(weight > 0, grads, trees.zeros_like(grads))


FLUSH = Effect(False)  # of a flush, in which no step is taken; compare with `is`


def inverse(a: Flag) -> Flag:
    """Flags are joined by & and |; ~ would make a number of a bool."""
    return not a if isinstance(a, bool) else ~a


def flag(condition: Flag) -> Flag:
    """A bool where Python can read the tensor without waiting for a device, the tensor otherwise."""
    return bool(condition) if type(condition) is not bool and trees.readable_without_sync(condition) else condition


def use(mark: Tensor, donated: bool) -> None:
    """Use a state, of which `mark` is a tensor that no other state has.

    Raises:
        DonatedState: it was donated before.
    """
    held: Any = mark
    if getattr(held, "_donated", False):
        text = "this state was donated to a step, which has overwritten it; use the state that the step returned"
        raise DonatedState(f"{text}: params, state = pipeline.step(params, grads, state, donate=True)")
    if donated:
        held._donated = True


def are_apart(leaves: list[Any]) -> bool:
    """Whether no two leaves share memory, and each is in one piece, so that it can be changed in place."""
    in_one_piece = torch.ops.aten.is_non_overlapping_and_dense.default
    if not all([isinstance(x, Tensor) and x.layout is torch.strided for x in leaves]):
        return False
    if not all([x.is_contiguous() or in_one_piece(x) for x in leaves]):
        return False
    full = [x for x in leaves if x.nbytes]
    sizes = {x.data_ptr(): x.nbytes for x in full}  # no tuple for each leaf: those start Python's garbage collector
    return len(sizes) == len(full) and all([a + sizes[a] <= b for a, b in itertools.pairwise(sorted(sizes))])


Rates = Sequence[tuple[str, float]]
_PIPELINE = "pipeline"
# Numbers in [2^19, 2^20): none is a multiple of another, and their sums over 2^14 ranks are exact in words.
LEAST = 2**19


def number_of(*parts: object) -> float:
    """A number that tells values apart where it is summed over ranks: the sum is a multiple only where all are equal."""
    return float(LEAST + zlib.crc32(repr(parts).encode()) % LEAST)


def mark_of(*parts: object) -> list[tuple[str, float]]:
    """What a pipeline's first step compares in addition: a number that tells these parts from others."""
    return [(_PIPELINE, float(int(specs.fingerprint(*parts)[:12], 16)))]


def rates_of(optimizer: Optimizer, params: Tree, slots: State) -> list[tuple[str, float]]:
    """The hyperparameters that may differ between ranks, by name; without those that Python cannot read now."""
    of_vectors = optimizer.select is None and optimizer.elementwise
    if trees.transformed() or (of_vectors and not compared(optimizer, optimizer.forms.probe)):
        return []
    if not trees.plain(params, slots):
        return []
    names, _, states, _ = states_of(params, slots)
    parts = {}
    for name, state in zip(names, states, strict=True):
        part = optimizer.at(name)
        parts[id(part)] = part, state
    hypers = [(compared(part, state), state.step) for part, state in parts.values()]
    return [rate for some, step in hypers if some for rate in check_rates(some, step)]


def words_to_sum(call: Call, rates: Rates) -> dict[str, Number]:
    """The words of a call that the ranks sum: this rank's weight, whether it has any, and a number for its rates."""
    weight, live, _ = call.totals()
    return {"weight": weight, "live": live, **({"rates": number_of(rates)} if rates else {})}


def totals_of_step(call: Call, axes: Sequence[str], rates: Rates, values: Tree) -> Totals:
    """The sums of the weights over the ranks of some axes, which the call knows then; one message, on the device of
    these values.

    Raises:
        DesyncError: on all ranks: they have other rates.
    """
    words, axes = [*words_to_sum(call, rates).values()], [name for name in axes if axis_size(name) > 1]
    if axes or any([isinstance(word, Tensor) for word in words]):
        own = shares.stacked(words, trees.device_of(optree.tree_leaves(values)))
        summed = psum(own, tuple(axes)) if axes else own
        words = summed.tolist() if trees.readable_without_sync(summed) else list(summed.unbind(0))
    return totals_from(call, axes, rates, words)


def totals_from(call: Call, axes: Sequence[str], rates: Rates, summed: Sequence[Number]) -> Totals:
    """As `totals_of_step`, from the sums of `words_to_sum`."""
    if rates and axes and not getattr(summed[2], "is_meta", False):  # `explain` runs without values
        _check(rates, summed[2], tuple(axes), call.step or 0)
    totals = shares.totals_of(*summed[:2])
    call.know(axes, totals)
    return totals


def _check(rates: Rates, summed: Number, axes: tuple[str, ...], step: int) -> None:
    """Raise DesyncError on all ranks of some axes unless they have these hyperparameters.

    Args:
        summed: The sum of `number_of(rates)` over the ranks.
    """
    if float(summed.detach() if isinstance(summed, Tensor) else summed) % (axis_size(axes) * number_of(rates)) == 0:
        return
    for some in (rates[:1], rates[1:]):  # of other pipelines there may be another number
        ranks = all_gather(torch.tensor([value for _, value in some], dtype=torch.float64), axes)
        for rank, there in enumerate(ranks.tolist()):
            for (name, _), value, first in zip(some, there, ranks[0].tolist(), strict=True):
                if value != first:
                    text = (
                        f"rank {rank} steps with {name}={value!r}, but rank 0 with {name}={first!r}; a schedule must not depend on "
                        f"the rank or its data, and with_hyperparameters(...) takes equal values on all ranks"
                    )
                    if name == _PIPELINE:
                        text = f"rank {rank} has another pipeline than rank 0; make it from the same arguments on all ranks"
                    raise DesyncError(f"step {step}: {text}", rank=rank, step=step)


class Skips(NamedTuple):
    """The state of a pipeline that runs another one and skips its non-finite steps."""

    begin: Callable[[State], Any]  # inner state -> outer state, which has the inner one in the field `inner`
    update_counters: Callable[[Any, Tensor], Any]  # (state, fine) -> state, after a step; `fine`, 0-d bool: with effect
    scaled: bool = False  # whether the gradients are those of the loss times `state.scale`


def unscaled(grads: Tree, scale: Tensor) -> Tree:
    """The gradients of a loss from those of the loss times a scale.

    An overflow becomes NaN, which no stage can make finite again.
    """
    factor = 1 / scale.to(torch.float64)

    def one(grad: Tensor) -> Tensor:
        own = (grad * trees.to_device(grad.device, factor)).to(grad.dtype)
        return torch.nan_to_num(own, nan=math.nan, posinf=math.nan, neginf=math.nan)

    return optree.tree_map(one, grads)


def refuse_float16(params: Tree) -> None:
    """Raise TypeError for float16 parameters, whose unscaled gradients would underflow."""
    for path, leaf in trees.named_leaves(params).items():
        if leaf.dtype is torch.float16:
            why = f"params[{path!r}] is float16, in which gradients vanish once they are unscaled"
            remedy = "keep parameters in float32 and let the loss cast them, by .half() or under torch.autocast"
            raise TypeError(f"{why}; {remedy}")


class PipelineState(NamedTuple):
    """The state of a pipeline; made by `Pipeline.init`, renewed by `Pipeline.step`."""

    hook: State
    optimizer: State  # the tree of the parameters with an optimizer state at every leaf
    after: State
    on_state: State
    step: int  # steps so far, skipped ones included, on the host; periods count by it
    window: base.Summed[Tensor]  # this rank's weights in the calls of `accumulate` since the last step, 0-d float64
    gather: State = ()  # of a sharded pipeline


@dataclass(frozen=True, eq=False, repr=False)
class Pipeline(base.Specified):
    """Gradient transform, then optimizer, then parameter transform; made by `fuse`.

    Args:
        init: `params -> state`; the state is `PipelineState(hook, optimizer, after, on_state, step, window)`.
        step: `(params, grads, state, *, weight=None) -> (params, state)`, pure. A weight for gradients of a loss that
            has communicated over the hook's axes is a ValueError: it must be in the loss.
        flush: `(params, state) -> (params, state)`, pure: runs now the transforms after the optimizer that would run in
            later steps, with the weights since their last run, and uses results that wait. For the end of a run.
        hook, optimizer, after, on_state: The parts of the pipeline; the last two may be None.
        sharding: For a pipeline whose hook shards: the pieces that ranks own.
        spec: The pipeline as data.
        skips: The state that counts skipped steps, for a pipeline that skips non-finite ones; None for others.
    """

    init: Callable[[Tree], State]
    step: Callable[..., tuple[Tree, State]]
    flush: Callable[..., tuple[Tree, State]]
    hook: Transform
    optimizer: Optimizer
    after: Transform | None = None
    on_state: Transform | None = None
    sharding: Sharding | None = None
    spec: Spec = Spec("")
    skips: Skips | None = None

    @property
    def ends(self) -> tuple[Transform, ...]:
        """The transforms that run after the optimizer."""
        return tuple(part for part in (self.after, self.on_state) if part is not None)

    def check(self, params: Tree) -> None:
        """Raise for parameters that this pipeline cannot train in a step of the shell."""
        if self.sharding and not self.sharding.gathers:
            where = "a loop of one's own, in which each rank has pieces"
            raise TypeError(f"sharded_over is for {where}; write zero(...) here")
        if self.optimizer.check:
            self.optimizer.check(params)
        if self.skips and self.skips.scaled:
            refuse_float16(params)

    instead_of_transform = "a pipeline is complete already; put the transform into its hook"


def parts_of(what: Pipeline | Transform, on_buffers: Transform | None = None) -> Parts:
    """The parts of a pipeline, or of a hook alone.

    Args:
        on_buffers: The transform of the buffers, in a train_step.
    """
    if isinstance(what, Transform):
        return Parts(on_buffers=on_buffers, steps=False)
    return Parts(what.after, what.on_state, what.skips is not None, on_buffers)


def warn_if_silent(what: Pipeline | Transform, mesh_axes: tuple[str, ...], ranks: int, stacklevel: int) -> None:
    """Warn if no part of a pipeline, or of a hook alone, communicates, unless the hook is `identity()`."""
    hook, ends = (what, ()) if isinstance(what, Transform) else (what.hook, what.ends)
    if not hook.facts.silent and not any(axes_of(part, mesh_axes) for part in (hook, *ends)):
        text = f"nothing in {what!r} reduces over the {ranks} ranks, so each trains on its own batches alone"
        remedy = f"put tx.mean({mesh_axes[0]!r}) into it, or tx.identity() where that is meant"
        warnings.warn(f"{text}; {remedy}", stacklevel=stacklevel + 1)
