"""A mean in two levels: most bytes stay inside a node, and messages between nodes may be encoded."""

from __future__ import annotations

import optree
import torch
from torch import Tensor

from ..axes import all_gather, axis_index, axis_size, psum, psum_scatter
from ..base import (
    Call,
    Compression,
    Needs,
    Over,
    Reduction,
    State,
    Transform,
    Tree,
    check_over,
    device_of,
    factory,
    named_leaves,
    one_axis,
    real,
    to_device,
    words_dtype,
)
from ..codecs import Codec, check_codec
from ._coded_sum import coded_sum, cut, encoded, ravel, unravel


@factory
def hierarchical_mean(local: str, node: str, codec: Codec | None = None, over: Over = "weight") -> Transform:
    """The mean over two axes: the ranks inside a node, whose links are fast, and the nodes.

    It has three stages:

    - the ranks of a node sum their gradients, and each keeps one part (psum_scatter over `local`);
    - ranks with the same index in their node sum their parts (psum over `node`);
    - the ranks of a node exchange the results (all_gather over `local`).

    So each rank sends across nodes only 1 / (ranks of the node) of the bytes that a mean over all ranks would send.

    Args:
        local: The axis inside a node.
        node: The axis across nodes.
        codec: The codec of messages between nodes; None: floats. `compress(codec, hierarchical_mean(...))` does the
            same, and stochastic codecs need that form.
        over: The divisor; see `mean`.

    Returns:
        A `Transform` whose `update` returns a tree like `grads`, equal on all ranks. It has no state.

    Raises:
        ValueError: `over` is none of the three; `local` and `node` are the same axis; `codec` is stochastic.

    Same as: torch's hierarchical sharding of HYBRID_SHARD.

    >>> from fjoin import transforms as tx
    >>> hook = hierarchical_mean("local", "node")
    >>> def one_rank(g):
    ...     return hook.update(g, hook.init(g))[0]
    >>> tx.simulate(one_rank, {"node": 2, "local": 2}, [torch.tensor(v) for v in (1.0, 2.0, 3.0, 6.0)])[3]
    tensor(3.)
    """
    check_over(over)
    local, node = one_axis("hierarchical_mean: local", local), one_axis("hierarchical_mean: node", node)
    if local == node:
        raise ValueError(f"local and node must be two axes, got {local!r} for both")
    if codec is not None and check_codec("codec", codec).stochastic:
        raise ValueError(
            f"{codec!r} is stochastic, and its random bits are keyed by steps; write "
            f"compress({codec!r}, hierarchical_mean(...))"
        )

    both = (local, node)

    def across(codec: Codec, x: Tensor, places: Tensor | None, feeds: bool) -> tuple[Tensor, Tensor | None]:
        """The sum of all ranks' floats, of which the nodes exchange codes: each rank those of its part."""
        inside, n = axis_size(local), len(x)
        here = to_device(x.device, axis_index(local)).view(1)
        part = psum_scatter(cut(x, inside), local)
        mine = None if places is None else cut(places, inside).index_select(0, here)[0]
        part, lost = coded_sum(node, codec, part, mine, feeds)
        if lost is not None:  # the residual of the node's message lies on the rank that has sent it
            rows = torch.arange(inside, device=x.device).unsqueeze(1) == here
            lost = torch.where(rows, lost, 0.0).flatten()[:n]
        return all_gather(part, local).flatten()[:n], lost

    def update(grads: Tree, state: State, params: Tree, call: Call) -> tuple[Tree, State]:
        grads = optree.tree_map(torch.as_tensor, grads)
        of = named_leaves(grads)
        real(of, "hierarchical_mean")
        device, wire = device_of(of.values()), call.wire or codec
        share = call.share(both, over, device)
        if wire is not None and axis_size(node) > 1:
            out = encoded(grads, share, call.inside(wire=wire), across)
        else:
            flat = ravel(of.values(), device, words_dtype(leaf.dtype for leaf in of.values()))
            flat = share._replace(total=None).times(flat)
            (part,) = share.divided([psum(psum_scatter(cut(flat, axis_size(local)), local), node)])
            out = unravel(all_gather(part, local).flatten()[: len(flat)], grads)
        return (share.unless_idle(out, grads) if call.persistent else out), state

    needs = Needs.NOTHING if codec is None or codec.elementwise else Needs.LAYOUT
    lossy = None if codec is None else Compression(named_leaves)
    return Transform(lambda params: (), update, needs, Reduction(both, over), lossy, takes=("wire",))
