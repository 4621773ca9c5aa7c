"""Parameters and optimizer states in one flat buffer for each bucket."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ..transforms.base import devices, trees
from ..transforms.layout import Bucket, Pieces, SlotRange, views
from ..transforms.optimizers import Ages, Optimizer, check_rates, compared, master_of


class GradLeaves:
    """Leaves made in the streams that are the current ones of their devices now.

    Gradients arrive in the stream of a leaf's node. Each forward pass makes a new node unless the old one is still
    referenced; with the references here the gradients of a bucket all arrive in one stream. In another stream than that
    torch warns of them: then leaves are made anew.

    Attributes:
        by_path: Path -> leaf, in the order of `shapes`.
        by_bucket: The leaves of each bucket.
        accelerators: The devices of the leaves that have streams.
    """

    def __init__(self, layout: Sequence[Bucket], flats: Sequence[Tensor], shapes: Mapping[str, torch.Size]) -> None:
        of: dict[str, Tensor] = {}
        for bucket, flat in zip(layout, flats, strict=True):
            for path, view in zip(bucket.paths, views(bucket, flat, shapes), strict=True):
                of[path] = view.detach().requires_grad_()
        self.by_path: dict[str, Tensor] = {path: of[path] for path in shapes}
        self.by_bucket: list[list[Tensor]] = [[of[path] for path in bucket.paths] for bucket in layout]
        self.accelerators: set[torch.device] = {
            bucket.device for bucket in layout if devices.is_accelerator(bucket.device)
        }
        self._nodes = [get_gradient_edge(leaf).node for leaf in of.values() if devices.is_accelerator(leaf.device)]
        self._made_in = self._streams()

    def _streams(self) -> list[Any]:
        return [devices.current_stream(device) for device in self.accelerators]

    def are_here(self) -> bool:
        """Whether they were made in the current streams."""
        return not self.accelerators or self._made_in == self._streams()

    def take_grads(self, before: GradLeaves, window: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Take over the gradients of other leaves; returns the sums of the window by these leaves."""
        pairs = list(zip(before.by_path.values(), self.by_path.values(), strict=True))
        for old, leaf in pairs:
            leaf.grad = old.grad
        return {leaf: window[old] for old, leaf in pairs if old in window}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_nodes": [], "_made_in": []}  # they cannot be copied


def states_of_span(
    part: Optimizer, state: Any, counts: Any, places: Mapping[str, tuple[int, torch.Size]]
) -> dict[str, Any]:
    """Path -> the parameter's part of a span's state, as views.

    Args:
        counts: The state whose common fields count the steps.
        places: Path -> where the parameter begins in the span, and its shape.
    """
    pairs = zip(trees.fields(state), trees.fields(counts), part.common, strict=True)
    whole = [count if common else field for field, count, common in pairs]
    cut, found = list(zip(whole, part.common, strict=True)), {}
    for path, (at, shape) in places.items():
        own = whole  # where the optimizer needs whole leaves: a span has one, and its state may have shapes of its own
        if part.elementwise:
            own = [f if c or f is None else f.reshape(-1)[at : at + shape.numel()].view(shape) for f, c in cut]
        found[path] = trees.with_fields(state, own)
    return found


def without_empty(ranges: list[list[Any]]) -> list[list[Any]]:
    """The ranges without the empty ones; of each optimizer one range stays, which counts the steps."""
    full = {id(part) for bucket in ranges for part, param, _, _ in bucket if param.numel()}
    kept = []
    for bucket in ranges:
        kept.append([one for one in bucket if one[1].numel() or id(one[0]) not in full])
        full |= {id(part) for part, _, _, _ in bucket}
    return kept


def of_one_age(layout: tuple[Bucket, ...], optimizer: Optimizer, slots: list[list[Any]]) -> list[list[Any]]:
    """The states of each optimizer with one count of steps, so that one kernel can step them all."""
    shared, found = Ages(), list[list[Any]]()
    for bucket, states in zip(layout, slots, strict=True):
        parts = [(optimizer.at(span.paths[0]), state) for span, state in zip(bucket.spans, states, strict=True)]
        like = torch.empty(0, dtype=bucket.dtype, device=bucket.device)
        found.append([state if part.step_params_ is None else shared(part, like, state) for part, state in parts])
    return found


def places_of(
    span: SlotRange, bucket: Bucket, shapes: Mapping[str, torch.Size], pieces: Pieces | None, k: int
) -> dict[str, tuple[int, torch.Size]]:
    """Path -> where a parameter, or this rank's slice of it, begins in the slots of a span, and its shape.

    Args:
        k: The number of the bucket.
    """
    offset = dict(zip(bucket.paths, bucket.offsets, strict=True))
    if pieces is None:
        return {path: (offset[path] - span.start, shapes[path]) for path in span.paths}
    begin, places = max(span.start, pieces.bounds[k][pieces.rank]), {}
    for path in span.paths:
        start, stop = pieces.slices[path]
        places[path] = offset[path] + start - begin if stop else 0, torch.Size((stop - start,))
    return places


class Storage:
    """The memory of a state: a flat buffer of parameters per bucket, and a slot state per span.

    Attributes:
        layout: The buckets.
        flats: One flat tensor of parameters per bucket.
        leaves: Path -> view into its bucket's flat tensor that requires a gradient, in the order of `params`.
        slots: The optimizer's state of each bucket and span, on the flat range.
        pieces: The pieces of the buckets that ranks own; None where every rank steps all of them.
        window: Leaf -> the sum of its gradients in the earlier calls of an accumulation window, in float32; of 16-bit
            leaves.
        exact: The exact values of this rank's piece of each bucket, where a codec sends their changes; otherwise empty.
        together: Whether one kernel steps the buckets of one optimizer, since launches cost more than memory does.
        float16: Whether some parameters are float16.
        has_masters: Whether the optimizer keeps master copies of some parameters.

    Args:
        memory: Gives a bucket's zeros, or None if any memory is as good.
    """

    def __init__(
        self,
        layout: tuple[Bucket, ...],
        params: Mapping[str, Tensor],
        optimizer: Optimizer,
        pieces: Pieces | None = None,
        memory: Callable[[Bucket], Tensor | None] = lambda bucket: None,
    ) -> None:
        self.layout, self.optimizer, self.pieces = layout, optimizer, pieces
        self.exact: list[Tensor] = []
        self.window: dict[Tensor, Tensor] = {}
        self.together: bool = not all(devices.is_host(bucket.device) for bucket in layout)
        self.float16: bool = any(bucket.dtype is torch.float16 for bucket in layout)
        self.shapes: dict[str, torch.Size] = {path: p.shape for path, p in params.items()}
        self.flats: list[Tensor] = []
        for bucket in layout:
            flat = memory(bucket)
            if flat is None:
                flat = torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)
            self.flats.append(flat)
            for path, view in zip(bucket.paths, views(bucket, flat, self.shapes), strict=True):
                view.copy_(params[path].detach())
        self.slots: list[list[Any]] = [[] for _ in layout]
        self._make_leaves()

    def _make_leaves(self) -> None:
        self._held = GradLeaves(self.layout, self.flats, self.shapes)
        self.on_accelerator: bool = bool(self._held.accelerators)
        self.leaves: dict[str, Tensor] = self._held.by_path
        self.by_bucket: list[list[Tensor]] = self._held.by_bucket

    def follow_stream(self) -> bool:
        """Make the leaves anew where the current stream is another one than theirs; returns whether it was."""
        before = self._held
        if before.are_here():
            return False
        self._make_leaves()
        self.window = self._held.take_grads(before, self.window)
        return True

    def make_slots(self, exact: bool = False) -> None:
        """Initialise the optimizer's slots from the current parameters.

        Args:
            exact: Whether this rank keeps exact values of its pieces, since a codec sends their changes.
        """
        if exact:
            self.exact = [self.own(k, flat).clone() for k, flat in enumerate(self.flats)]
        slots = list[list[Any]]()
        for k, (bucket, own) in enumerate(zip(self.layout, self._stepped(), strict=True)):
            parts = [(self.optimizer.at(span.paths[0]), span) for span in bucket.spans]
            slots.append([part.init_param(self._range(part, own, span, k)) for part, span in parts])
        self.set_slots(slots)

    def own(self, k: int, flat: Tensor) -> Tensor:
        """The part of a bucket's buffer that this rank steps."""
        if self.pieces is None:
            return flat
        start, stop = self.pieces.bounds[k][self.pieces.rank : self.pieces.rank + 2]
        return flat[start:stop]

    def _stepped(self) -> list[Tensor]:
        """The values that this rank steps, of each bucket."""
        return self.exact or [self.own(k, flat) for k, flat in enumerate(self.flats)]

    def own_leaves(self) -> dict[str, Tensor]:
        """Path -> the values that this rank steps: views of leaves, or of slices of them."""
        if self.pieces is None:
            return {path: leaf.detach() for path, leaf in self.leaves.items()}
        found: dict[str, Tensor] = {}
        for k, own in enumerate(self._stepped()):
            found.update(self.pieces.leaves_own(k, own))
        return {path: found[path] for path in self.shapes}

    def set_slots(self, slots: list[list[Any]]) -> None:
        self.slots = slots = of_one_age(self.layout, self.optimizer, slots) if self.together else slots
        self._states: dict[str, Any] | None = None
        self._ranges = [
            [
                (part := self.optimizer.at(span.paths[0]), self._range(part, own, span, k), span, slot)
                for span, slot in zip(bucket.spans, slots, strict=True)
            ]
            for k, (bucket, own, slots) in enumerate(zip(self.layout, self._stepped(), self.slots, strict=True))
        ]
        self.has_masters: bool = any(master_of(slot) is not None for ranges in self._ranges for *_, slot in ranges)
        if self.pieces is not None:
            self._ranges = without_empty(self._ranges)
        # Of slices only the states that are stepped count the steps.
        watched = {id(one[0]): (compared(one[0], one[3]), one[3].step) for ranges in self._ranges for one in ranges}
        self._watched = [(hypers, step) for hypers, step in watched.values() if hypers]

    def _range(self, part: Optimizer, own: Tensor, span: SlotRange, k: int) -> Tensor:
        """A span's part of the values that this rank steps: flat, or in the leaf's shape where the optimizer needs it."""
        low, high = (0, len(own)) if self.pieces is None else self.pieces.bounds[k][self.pieces.rank :][:2]
        piece = own[max(span.start - low, 0) : max(min(span.stop, high) - low, 0)]
        if part.elementwise:
            return piece
        path = span.paths[0]
        shape = self.shapes[path] if self.pieces is None else self.pieces.shape(path)
        return piece[: shape.numel()].view(shape)

    def check_rates(self) -> list[tuple[str, float]]:
        """The hyperparameters of the next step that may differ between ranks, by name; it does not wait for a device.

        Raises:
            ValueError, TypeError: a schedule did not return one finite number, or a tensor does not hold one.
        """
        return [rate for hypers, step in self._watched for rate in check_rates(hypers, step)]

    def ranges(self, bucket: int, grads: Tensor) -> list[tuple[Optimizer, Tensor, Tensor, Any]]:
        """(optimizer, parameters, gradients, slots) of each span, to be stepped in place."""
        return [
            (part, param, self._range(part, grads, span, bucket), slot)
            for part, param, span, slot in self._ranges[bucket]
        ]

    def clear_grads(self) -> None:
        self.window.clear()
        for leaf in self.leaves.values():
            leaf.grad = None

    @contextlib.contextmanager
    def grads_aside(self) -> Iterator[None]:
        """Set the leaves' gradients aside within a with block; restore them at its end."""
        kept = {leaf: leaf.grad for leaf in self.leaves.values()}
        window, self.window = self.window, {}
        self.clear_grads()
        try:
            yield
        finally:
            self.window = window
            for leaf, grad in kept.items():
                leaf.grad = grad

    def written(self, within: bool) -> list[Tensor]:
        """The memory that a step overwrites: the parameters and, `within` a window, the accumulated gradients."""
        grads = (*(leaf.grad for leaf in self.leaves.values()), *self.window.values()) if within else ()
        return [*self.flats, *(grad for grad in grads if grad is not None and grad.layout is torch.strided)]

    def optimizer_states(self) -> dict[str, Any]:
        """Path -> the parameter's own optimizer state, views of the slots in its shape, or in that of its slice."""
        if self._states is None:
            # Of slices only the states that are stepped count the steps.
            made = self._views_of_slots(self.states_of_parts() if self.pieces else {})
            self._states = {path: made[path] for path in self.shapes}  # they stay where they are
        return dict(self._states)

    def states_of_parts(self) -> dict[int, Any]:
        """The id of each optimizer -> a state of it that counts the steps."""
        return {id(part): slot for ranges in self._ranges for part, _, _, slot in ranges}

    def _views_of_slots(self, counts: Mapping[int, Any]) -> dict[str, Any]:
        """Path -> the parameter's part of its slots.

        Args:
            counts: The id of an optimizer -> the state that counts its steps, where each slot does not count them itself.
        """
        out: dict[str, Any] = {}
        for k, (bucket, slots) in enumerate(zip(self.layout, self.slots, strict=True)):
            for span, state in zip(bucket.spans, slots, strict=True):
                part, places = self.optimizer.at(span.paths[0]), places_of(span, bucket, self.shapes, self.pieces, k)
                out.update(states_of_span(part, state, counts.get(id(part), state), places))
        return out

    def load_optimizer_states(self, states: Mapping[str, Any]) -> None:
        """Copy states by path into the slots; the inverse of `optimizer_states`.

        Raises:
            ValueError: parameters of one optimizer have taken other numbers of steps, of which a step has one.
        """
        first: dict[int, tuple[str, list[float]]] = {}
        for path, state in states.items():
            part = self.optimizer.at(path)
            common = itertools.compress(trees.fields(state), part.common)
            counts = [float(field) for field in common if field is not None]
            other, others = first.setdefault(id(part), (path, counts))
            if part.elementwise and counts != others:
                raise ValueError(
                    f"{path!r} has taken {state.step} steps, and {other!r} another number, but they have one optimizer; give them "
                    f"one each, by tx.partition, or start both anew by fresh="
                )
        for path, own in self._views_of_slots({}).items():
            for place, value in zip(trees.fields(own), trees.fields(states[path]), strict=True):
                if place is not None:
                    place.copy_(value)

    def clone(self) -> Storage:
        """A copy in memory of its own, including gradients that are being accumulated."""
        new = copy.copy(self)
        new.window, new.exact = {}, [own.clone() for own in self.exact]
        new.flats = [flat.clone() for flat in self.flats]
        new._make_leaves()
        slots: Any = self.slots
        new.set_slots(optree.tree_map(torch.clone, slots))  # type: ignore[arg-type]
        for old, leaf in zip(self.leaves.values(), new.leaves.values(), strict=True):
            leaf.grad = None if old.grad is None else old.grad.clone()
            if old in self.window:
                new.window[leaf] = self.window[old].clone()
        return new
