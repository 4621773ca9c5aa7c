"""What a minimum cut of the graph of the forward and the backward pass keeps."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import config, min_cut_rematerialization_partition  # type: ignore[import-untyped]
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from ._abstract import abstract
from ._region import Region
from .record._kept import Place
from .record._record import Record
from .surroundings._reach import captured
from .surroundings._result import tensors_of

_PLACE = "place in the run"
_TRACES = threading.Lock()  # torch's tracing is of the whole process
_RULES = ("used_far_apart", "long_fusible_chains", "materialized_backward", "not_in_allowlist", "reductions")


def minimum_cut(fn: Callable[..., Any], preserve_rng: bool, args: Any, kwargs: Any) -> frozenset[Place]:
    """The operations whose results the backward pass is to find, so that the fewest bytes are kept.

    Raises:
        ValueError: the function writes into a tensor.
    """
    with abstract(fn, args, kwargs) as of:
        found = captured(fn, of.args, of.kwargs)
        region = Region(fn, of.args, of.kwargs, found, Record(preserve_rng, found.places))

        def both(primals: list[Tensor], tangents: list[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
            with torch.enable_grad():  # tracing has none
                inputs = [
                    x.detach().requires_grad_(own.requires_grad) for x, own in zip(primals, region.tensors, strict=True)
                ]
                out = tensors_of(region.run(inputs))
                ends = [x for x in out if x.requires_grad]
                grads = torch.autograd.grad(ends, [x for x in inputs if x.requires_grad], tangents, allow_unused=True)
            return out, list(grads)

        shapes = tensors_of(region.run(region.tensors))
        starts = [torch.empty_like(x) for x in shapes if x.requires_grad]
        if not starts:
            return frozenset()
        with _TRACES:
            joint: Any = make_fx(both)([x.detach() for x in region.tensors], starts)
        counts = Counter[Any]()
        for node in joint.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload):
                if node.target._schema.is_mutable:
                    raise ValueError(
                        f"remat: min_cut cannot keep values of a function that writes into tensors, by {node.target}"
                    )
                node.meta[_PLACE] = node.target, counts[node.target]
                counts[node.target] += 1
            if node.target is torch.ops.aten.detach.default:  # what the graph of autograd saves, not another value
                node.replace_all_uses_with(node.args[0])
        # Without these rules, made for fused kernels, all but products of matrices and the like may run again.
        with config.patch({f"ban_recompute_{name}": False for name in _RULES}):
            forward, _ = min_cut_rematerialization_partition(joint, (), num_fwd_outputs=len(shapes))
    kept = [node for node in tree_leaves(forward.graph.output_node().args)[len(shapes) :] if isinstance(node, Node)]
    return frozenset(place for node in kept if (place := _place(node)) is not None)


def _place(node: Node) -> Place | None:
    """The operation that makes a value: of a part of a result, that which makes the result."""
    while _PLACE not in node.meta and node.op == "call_function" and isinstance(node.args[0], Node):
        node = node.args[0]
    return node.meta.get(_PLACE)
