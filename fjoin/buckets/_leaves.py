"""The leaves of a state: views of its flat parameters that require gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ..transforms._devices import current_stream, is_accelerator
from ..transforms.layout._buckets import Bucket, views


class Leaves:
    """Leaves made in the streams that are the current ones of their devices now.

    Gradients arrive in the stream of a leaf's node. Each forward pass makes a new node unless the old one is still
    referenced; with the references here the gradients of a bucket all arrive in one stream. In another stream than that torch
    warns of them: then leaves are made anew.

    Attributes:
        by_path: Path -> leaf, in the order of `shapes`.
        by_bucket: The leaves of each bucket.
    """

    def __init__(self, layout: Sequence[Bucket], flats: Sequence[Tensor], shapes: Mapping[str, torch.Size]) -> None:
        of: dict[str, Tensor] = {}
        for bucket, flat in zip(layout, flats, strict=True):
            for path, view in zip(bucket.paths, views(bucket, flat, shapes), strict=True):
                of[path] = view.detach().requires_grad_()
        self.by_path: dict[str, Tensor] = {path: of[path] for path in shapes}
        self.by_bucket: list[list[Tensor]] = [[of[path] for path in bucket.paths] for bucket in layout]
        self._devices = {bucket.device for bucket in layout if is_accelerator(bucket.device)}
        self._nodes = [get_gradient_edge(leaf).node for leaf in of.values() if is_accelerator(leaf.device)]
        self._made_in = self._streams()

    def _streams(self) -> list[Any]:
        return [current_stream(device) for device in self._devices]

    def are_here(self) -> bool:
        """Whether they were made in the current streams."""
        return self._made_in == self._streams()

    def take_grads(self, before: Leaves, window: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Take over the gradients of other leaves; returns the sums of the window by these leaves."""
        pairs = list(zip(before.by_path.values(), self.by_path.values(), strict=True))
        for old, leaf in pairs:
            leaf.grad = old.grad
        return {leaf: window[old] for old, leaf in pairs if old in window}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_nodes": [], "_made_in": []}  # they cannot be copied
