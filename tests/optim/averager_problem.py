"""A model that ranks train apart, with torch's averagers or ours."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.model_averaging import averagers, hierarchical_model_averager, utils

import fjoin
from tests.oracle.whole_batch import make_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit.script, which this import calls
    from torch.distributed.optim import PostLocalSGDOptimizer as Torchs

MADE = {
    ("torch's", "periodic"): averagers.PeriodicModelAverager,
    ("torch's", "hierarchical"): hierarchical_model_averager.HierarchicalModelAverager,
    ("ours", "periodic"): fjoin.PeriodicModelAverager,
    ("ours", "hierarchical"): fjoin.HierarchicalModelAverager,
}


def made(whose: str, kind: str, *args: Any) -> Any:
    """Without the warnings about a period of 1."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return MADE[whose, kind](*args)


@contextlib.contextmanager
def torchs_averages_raise() -> Iterator[None]:
    """torch's own averages, and the steps of its optimizer, raise in this block."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("torch's own average of parameters was called")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("average_parameters", "average_parameters_or_parameter_groups", "get_params_to_average"):
            patch.setattr(utils, name, refuse)
        for name in ("step", "__init__"):
            patch.setattr(Torchs, name, refuse)
        yield


def gradients(params: list[Tensor], step: int) -> None:
    """Set gradients of this rank and step."""
    g = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    for p in params:
        p.grad = torch.randn(p.shape, generator=g, dtype=torch.float64).to(p.dtype)


def displacements(whose: str, kind: str, args: tuple[Any, ...], steps: int) -> list[list[Tensor]]:
    """The parameters minus their initial values, after each step."""
    with torchs_averages_raise() if whose == "ours" else contextlib.nullcontext():
        net, averager = make_model(), made(whose, kind, *args)
        params = list(net.parameters())
        start = [p.detach().clone() for p in params]
        optimizer, seen = torch.optim.SGD(params, 0.1, momentum=0.9), []
        for step in range(steps):
            gradients(params, step)
            optimizer.step()
            averager.average_parameters(params if step % 2 else optimizer.param_groups)
            seen.append([p.detach() - q for p, q in zip(params, start, strict=True)])
        assert averager.step == steps
    return seen
