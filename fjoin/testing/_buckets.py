"""The laws of a transform that is called on a part of the tree: on some leaves, on a flat buffer, on one bucket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import transforms as tx
from ..transforms.plan._plan import takes_flat
from ..transforms.transform._call import Call
from ..transforms.transform._rider import BucketSums
from ..transforms.transform._transform import Needs
from ..transforms.tree._bucketwise import merge, restrict
from ._compare import max_diff, params_like, same_bits
from ._ranks import axes_for, grads_of, rank_in


def keeps_to_its_needs(make: Callable[[], tx.Transform]) -> None:
    """Without LEAVES, PATHS and TREE a flat buffer may stand for the tree; without LAYOUT and TREE any subset of the leaves."""

    def one_rank() -> None:
        part, params = make(), params_like()
        grads = grads_of(rank_in(make))
        out, _ = part.update(grads, part.init(params), params, weight=2.0)
        if out is None:
            return
        if takes_flat(part):
            paths = tuple(sorted(grads))  # the order of a tree's leaves
            one = _ravel(params, paths)
            flat, _ = part.update(_ravel(grads, paths), part.init(one), one, weight=2.0)
            assert max_diff(flat, _ravel(out, paths)) == 0, "the flat buffer gave another answer"
        if not part.needs & (Needs.LAYOUT | Needs.TREE):
            for path in grads:
                if not _serves(part, path):
                    continue
                one, _ = part.update(
                    {path: grads[path]}, part.init({path: params[path]}), {path: params[path]}, weight=2.0
                )
                assert max_diff(one, {path: out[path]}) == 0, f"{path} alone gave another answer"

    tx.simulate(one_rank, axes_for(make))


BUCKETS = (("scale", "layer.bias"), ("layer.weight", "none"))


def goes_bucket_by_bucket(make: Callable[[], tx.Transform]) -> None:
    """Calls bucket by bucket equal one call on the whole tree, and agree on the common part of the state."""

    def one_rank() -> None:
        part, params = make(), params_like()
        if Needs.TREE in part.needs:
            return
        rank = rank_in(make)
        whole = part.init(params)
        layout = Needs.LAYOUT in part.needs
        flat = takes_flat(part) and not layout
        states = [part.init(_ravel(params, paths)) if flat else restrict(whole, params, paths) for paths in BUCKETS]
        for step in range(3):
            grads, weight = grads_of(10 * step + rank), float(rank)
            out, whole = part.update(grads, whole, params, weight=weight, lane={"x": 1.0})
            outs: list[Any] = []
            first: BucketSums | None = None
            for i, paths in enumerate(BUCKETS):
                pick = (
                    (lambda tree, p=paths: _ravel(tree, p)) if flat else (lambda tree, p=paths: {k: tree[k] for k in p})
                )
                sums = BucketSums(torch.float32, first)
                call = Call(weight, {"x": 1.0}).inside(sums=sums)
                one, states[i] = part.run(pick(grads), states[i], pick(params), call)
                first = first or sums
                assert (one is None) == (out is None)
                if out is not None and not layout:
                    assert same_bits(one, pick(out)), "a bucket alone gave another answer"
                    outs.append(one)
            if layout:  # codes depend on the layout
                assert same_bits(merge(states, params), merge(states[::-1], params)), "the buckets do not agree"
            elif not flat:
                for order in (states, states[::-1]):
                    assert same_bits(merge(order, params), whole), "the buckets' states are not the state of the whole"

    tx.simulate(one_rank, axes_for(make))


def _ravel(tree: Any, paths: tuple[str, ...]) -> Any:
    return {"": torch.cat([tree[path].reshape(-1) for path in paths])}


def _serves(part: tx.Transform, path: str) -> bool:
    """Whether a transform by path can be set up for this path alone."""
    try:
        part.init({path: params_like()[path]})
    except ValueError:
        return False
    return True
