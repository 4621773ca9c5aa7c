"""A mean in two levels: most bytes stay inside a node, and what leaves it may be encoded."""

from __future__ import annotations

from typing import Any

import torch

from .._base import Transform
from .._bucketwise import Carried
from .._spec import factory
from .._tree import Tree, named_leaves
from ..axes._collectives import all_gather, axis_size, psum, psum_scatter
from ..sync._lane import Lane, decode_lane, encode_lane, lane_dtype
from ..sync._mean import MeanState, carried_state, init_mean
from ..sync._weights import Over, check_over, check_weight, known_share, not_zero, share, silenced
from ._codec import Codec, refuse_derivative
from ._encoded import unravel
from ._reduce import coded_mean, cut


@factory
def hierarchical_mean(local: str, node: str, wire: Codec | None = None, over: Over = "weight") -> Transform:
    """The mean over two axes, of which the first is fast: the ranks inside a node, and the nodes.

    The ranks of a node sum their gradients so that each keeps a part (psum_scatter over `local`), ranks of equal place sum
    their parts over `node`, and those of a node give each other the results (all_gather over `local`). So what leaves a
    node is 1 / ranks of the node of what a mean over all ranks would send from each rank.

    Args:
        local: The axis inside a node.
        node: The axis across nodes.
        wire: What travels across nodes; `compress(codec, hierarchical_mean(...))` says the same. None: floats.
        over: What to divide by; see `mean`.

    Returns:
        A `Transform` whose `update` returns a tree like `grads`, equal on all ranks.
        State: `MeanState(total, lane)`.

    Raises:
        ValueError: `over` is none of the three; `local` and `node` are the same axis.

    Same as: torch's hierarchical sharding of HYBRID_SHARD; NCCL's trees.

    >>> from fjoin import transforms as tx
    >>> hook = hierarchical_mean("local", "node")
    >>> def one_rank(g):
    ...     return hook.update(g, hook.init(g))[0]
    >>> tx.simulate(one_rank, {"node": 2, "local": 2}, [torch.tensor(v) for v in (1.0, 2.0, 3.0, 6.0)])[3]
    tensor(3.)
    """
    check_over(over)
    if local == node:
        raise ValueError(f"local and node must be two axes, got {local!r} for both")
    given = wire

    def update(
        grads: Tree, state: MeanState, params: Tree = None, *, weight: Any = None, lane: Lane | None = None,
        carried: Carried | None = None, wire: Codec | None = None, **extra: Any,
    ) -> tuple[Tree, MeanState]:  # fmt: skip
        del state, params, extra
        if lane and "total" in lane:
            raise ValueError("'total' in the lane is taken by the sum of the weights; choose another name")
        of = {path: torch.as_tensor(leaf) for path, leaf in named_leaves(grads).items()}
        inside, nodes, factor = axis_size(local), axis_size(node), share(check_weight(weight), over)
        dtype = lane_dtype(leaf.dtype for leaf in of.values())
        flat = [leaf.reshape(-1).to(dtype) for leaf in of.values()] or [torch.zeros(0, dtype=dtype)]
        own, known = flat[0] if len(flat) == 1 else torch.cat(flat), known_share(weight, over)
        own = silenced(own, factor, known)
        own = own if known == 1.0 else own * factor.to(own)
        named = {"total": factor, **({} if carried is not None else lane or {})}
        words = encode_lane(named, dtype, inside * nodes, own.device)
        size = -(-own.numel() // inside)
        rows = torch.cat([cut(own, inside, size), words.expand(inside, -1)], dim=1)
        part = psum_scatter(rows, local)
        codec = wire or given
        if codec is None or nodes == 1:
            part = psum(part, node)
            sums = decode_lane(part[size:], named, inside * nodes)
            total, part = sums.pop("total"), part[:size]
            divisor = torch.full_like(total, inside * nodes) if over == "world" else total
            part = part / not_zero(divisor).to(part)
        else:
            refuse_derivative(of.values(), "differentiate through the hook without its codec, or detach the gradients")
            sums = decode_lane(part[size:], named, inside * nodes)
            here = sums.pop("total")
            said = torch.stack(list(sums.values())) if sums else torch.zeros(0, dtype=torch.float64, device=own.device)
            reduced = coded_mean(codec, (part[:size] / not_zero(here).to(part)).float(), here, said, node)
            total, part = reduced.total, reduced.mean
            divisor = torch.full_like(total, inside * nodes) if over == "world" else total
            if over == "world":
                part = part * (total / divisor).to(part)
            sums = dict(zip(sums, reduced.words.unbind(0), strict=True))
        whole = all_gather(part, local).flatten()
        out = unravel(whole[: own.numel()], grads)
        return out, carried_state(carried) if carried is not None else MeanState(divisor, sums)

    scope: Any = "element" if wire is None or wire.elementwise else "message"
    return Transform(init_mean, update, scope=scope, sums=lambda state: state, wired=True)
