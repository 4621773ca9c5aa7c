"""The sharding of a pipeline: which part of each parameter a rank steps, and how the parameters are gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import optree
from torch import Tensor

from ..axes import axis_index, axis_size, names
from ..base import Needs, State, Transform, Tree, check_transform, specs, timings, trees
from ..codecs import Codec, check_codec
from ..combinators import chain, stages
from ..layout import Pieces, cut, local_pieces, owners
from ..optimizers import Optimizer, master_of
from ..reductions import GatherState, ShardState, cut_of, gather, gather_changes, mean, mean_of_sums
from ._plan import axes_of


class Sharding:
    """The pieces of a pipeline's parameters.

    Args:
        axis: The axis over which the hook shards.
        optimizer: The optimizer, which may need whole leaves.
        codec: The codec of the changes of the parameters; None: the parameters themselves are gathered.
    """

    gathers = True  # whether ranks have whole parameters, and gather them after each step

    def __init__(self, axis: str, optimizer: Optimizer, codec: Codec | None) -> None:
        self.axis, self._optimizer, self.codec = axis, optimizer, codec
        self._made: dict[Any, Pieces] = {}

    def pieces(self, params: Tree, bucket_bytes: int | None = None, direct_bytes: int | None = None) -> Pieces:
        """The pieces of these parameters, by their paths, shapes and dtypes, and the ranks of the bound axis.

        Raises:
            ValueError: two leaves have one path.
        """
        ranks, rank = axis_size(self.axis), int(axis_index(self.axis))
        paths, leaves, _ = trees.flatten_in_insertion_order(params)
        forms = ((path, p.shape, p.dtype, p.device) for path, p in zip(paths, leaves, strict=True))
        key = (ranks, rank, bucket_bytes, direct_bytes, *forms)
        if key not in self._made:
            trees.named_leaves(params)  # raises where two leaves have one path
            named = dict(zip(paths, leaves, strict=True))
            self._made[key] = self._cut(named, ranks, rank, bucket_bytes, direct_bytes)
        return self._made[key]

    def _cut(self, params: Mapping[str, Tensor], ranks: int, rank: int, *sizes: int | None) -> Pieces:
        return cut(params, self._optimizer, self.axis, ranks, rank, *sizes)

    def init(self, pieces: Pieces, own: Tree, slots: Any) -> ShardState | GatherState:
        """The state of the gather."""
        if self.codec is None:
            return ShardState(cut_of(pieces))
        named, states = trees.named_leaves(own), by_path(own, slots)
        master = {path: leaf.detach().clone() for path, leaf in named.items() if master_of(states[path]) is None}
        return GatherState(cut_of(pieces), 0, master)

    def check(self, pieces: Pieces, state: Any) -> None:
        """Raise ValueError unless the state of the gather is of this pipeline, and of as many ranks."""
        if not isinstance(state, ShardState if self.codec is None else GatherState):
            both = f"the gather's state is a {type(state).__name__}, but gather_codec={self.codec!r}"
            raise ValueError(f"{both}: it is another pipeline's state")
        if state.cut != (here := cut_of(pieces)):
            raise ValueError(
                f"the state is cut into pieces for {state.cut.ranks} ranks, and is of rank {state.cut.rank}, but {self.axis!r} has "
                f"{here.ranks} and this is rank {here.rank}. Each rank must be given its own state; for another number of ranks reshard "
                f"it: put the slices of all ranks together, and start this pipeline's init with them cut anew. Where ranks agree, it "
                f"is of other pieces: those of other parameters, of another optimizer, or of another bucket_bytes"
            )

    def held(self, pieces: Pieces, params: Tree, state: ShardState | GatherState) -> Tree:
        """This rank's slices of the parameters, or their exact values."""
        own = pieces.own(params)
        if not isinstance(state, GatherState):
            return own
        return trees.map_with_path(lambda path, leaf: state.master.get(path, leaf), own)

    def gather(self, pieces: Pieces, params: Tree, own: Tree, slots: Any, state: Any) -> tuple[Tree, Any]:
        """The new parameters and the state of the gather, from the new slices.

        Args:
            params: The old parameters.
            own: The new slices.
            slots: The new states of the optimizer; may be empty where it keeps no master copies.
        """
        if self.codec is None:
            return gather(pieces, own, params), state
        states, named = by_path(own, slots) if slots else {}, trees.named_leaves(own)
        exact = {path: leaf if (m := master_of(states.get(path))) is None else m for path, leaf in named.items()}
        new = gather_changes(pieces, exact, params, self.codec, state.step)
        return new, trees.with_changes(state, step=state.step + 1, master={path: named[path] for path in state.master})


class LocalSharding(Sharding):
    """The pieces of parameters of which a rank has only its pieces.

    Args:
        pieces: The pieces, where it is known how they make up whole parameters.
    """

    gathers = False

    def __init__(self, axis: str, optimizer: Optimizer, pieces: Pieces | None = None) -> None:
        super().__init__(axis, optimizer, None)
        self._pieces = pieces

    def _cut(self, params: Mapping[str, Tensor], ranks: int, rank: int, *sizes: int | None) -> Pieces:
        if self._pieces is not None:
            return self._pieces
        if whole := owners(params, self._optimizer, ranks):
            has = f"each rank of {self.axis!r} has a piece of it"
            remedy = "shard with fully_shard and fjoin.fsdp.register, or with zero(...)"
            raise ValueError(f"the optimizer of {min(whole)!r} needs the whole parameter, but {has}; {remedy}")
        # As if no other rank had any of them.
        return local_pieces(params, self.axis, ranks, rank, dict.fromkeys(params, rank))


def by_path(params: Tree, slots: State) -> dict[str, Any]:
    """Path -> optimizer state."""
    paths, _, structure = optree.tree_flatten_with_path(params)
    return dict(zip(map(trees.path_string, paths), structure.flatten_up_to(slots), strict=True))


def sharding_of(
    hook: Transform, optimizer: Optimizer, after: Transform | None, on_state: Transform | None, codec: Codec | None
) -> Sharding | None:
    """The sharding of a pipeline of these parts; None where its hook does not shard.

    Raises:
        ValueError: two shardings; a stage behind one that cannot work on slices; a transform after the optimizer that
            reduces over the same axis; `gather_codec` without a sharding.
    """
    found = [part for part in _walk(hook) if _shards(part)]
    if codec is not None:
        check_codec("fuse: gather_codec", codec)
    if not found or _arrives(found[0]):
        if codec is not None:
            raise ValueError(f"fuse: gather_codec={codec!r} encodes sharded parameters; {hook!r} holds no scatter_mean")
    if not found:
        return None
    if len(found) > 1:
        remedy = "write one scatter_mean and means: chain(scatter_mean('local'), mean('node'))"
        raise ValueError(f"fuse: {hook!r} shards twice; {remedy}")
    axis, around, behind = str(found[0].sharded_over), hook, list[tuple[Transform, tuple[str, ...]]]()
    while not _shards(around):  # the transforms that hold the one that shards
        if around.facts.wraps not in ("stages", "whole"):
            raise ValueError(f"fuse: {around!r} cannot hold a scatter_mean: it may leave gradients that no rank owns")
        inside = timings.children(around)
        at = next(i for i, child in enumerate(inside) if child.sharded_over)
        behind += [(stage, ()) for stage in inside[at + 1 :] if around.facts.wraps == "stages"]
        around = inside[at]
    shards = f"mean({axis!r})" if _arrives(found[0]) else repr(found[0])  # as the user has written it
    for part, mesh_axes in (*behind, *((part, (axis,)) for part in (after, on_state) if part is not None)):
        if axis in axes_of(part, mesh_axes):
            why = f"the ranks of {axis!r} then hold different pieces; use it over the other axes"
            raise ValueError(f"fuse: {part!r} communicates over {axis!r} behind {shards}, but {why}")
        if part.needs & (Needs.LEAVES | Needs.TREE) and not part.accepts("sharded_over"):
            why = f"fuse: {part!r} cannot work behind {shards}, which leaves each rank flat slices of the leaves"
            remedy = "put it before, or give its update the keyword sharded_over, the axis over which it must sum"
            raise ValueError(f"{why}; {remedy}")
    return LocalSharding(axis, optimizer) if _arrives(found[0]) else Sharding(axis, optimizer, codec)


def in_pieces(part: Any, axis: str, make: Callable[..., Transform]) -> Any:
    """The transform, with `make(axis, over)` in the place of each mean over an axis, and a mean over its other axes."""
    if isinstance(part, tuple):
        return tuple(in_pieces(one, axis, make) for one in part)
    factory = part.spec.factory if isinstance(part, Transform) else None
    if factory is None:
        return part
    of = part.facts.reduces
    if of is not None and of.fusable and not of.scatters and of.over is not None and axis in names(of.axis):
        rest = tuple(one for one in names(of.axis) if one != axis)
        found = make(axis, of.over)
        return chain(found, mean(rest if len(rest) > 1 else rest[0], of.over)) if rest else found
    return specs.call_factory(factory, ((name, in_pieces(value, axis, make)) for name, value in part.spec.args))


def of_sums(hook: Transform, axis: str) -> Transform:
    """The hook for gradients of which each rank has pieces of the sums over an axis.

    Raises:
        TypeError: `axis` is not one name.
        ValueError: the hook does not begin with a mean over this axis.
    """
    if not isinstance(axis, str):
        raise TypeError(f"sharded_over is the name of one axis, got {axis!r}")
    first, *rest = stages(check_transform(hook, "hook")) or [hook]
    of = first.facts.reduces
    if of is None or not of.fusable or of.scatters or of.over is None or axis not in names(of.axis):
        first_stage = f"mean({axis!r}), which nothing encodes: chain(mean({axis!r}), ...)"
        why = f"the gradients arrive as sums over {axis!r}, in pieces"
        raise ValueError(f"{why}, so the hook must begin with {first_stage}; got {hook!r}")
    return chain(in_pieces(first, axis, mean_of_sums), *rest)


def _arrives(part: Transform) -> bool:
    return part.facts.reduces is not None and part.facts.reduces.arrives


def _shards(part: Transform) -> bool:
    return part.facts.reduces is not None and part.facts.reduces.scatters


def _walk(part: Transform) -> Iterator[Transform]:
    yield part
    for child in timings.children(part):
        yield from _walk(child)
