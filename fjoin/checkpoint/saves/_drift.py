"""Replicas that should be equal, and are not."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

from ...agreement._replicas import form
from ...groups._mesh import Mesh
from ...transforms._axis_env import bind_axes
from ...transforms.axes._collectives import pmax, pmin
from ..values._snapshot import Snapshot
from ._plan import Plan


def drifted(mesh: Mesh, plan: Plan, found: Snapshot) -> dict[str, str]:
    """Name -> a line, for each value that is not equal where its placement says so."""
    if mesh.size == 1:
        return {}
    pairs = plan.replicas.apart(mesh, "a comparison of replicas", found.values)
    spread = _spread(mesh, found, sorted(pairs.keys() & (found.places.keys() - found.by_content)))
    return {
        name: f"{name} of rank {rank} differs from that of rank {other}"
        + (f" by up to {spread[name]:g} ulp" if name in spread else "")
        for name, (rank, other) in pairs.items()
    }


def _spread(mesh: Mesh, found: Snapshot, names: Collection[str]) -> dict[str, float]:
    """Name -> the largest difference between ranks, in units of the last place of the larger value; of floats."""
    if not names:
        return {}
    values = {name: found.values.get(name) for name in names}
    forms = {name: form(v) if isinstance(v, Tensor) else "" for name, v in values.items()}
    same = mesh.exchange("the forms of values that differ", forms, lambda all_of: [one == all_of[0] for one in all_of])
    spread = {}
    for name, value in values.items() if all(same) else ():
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            with bind_axes(mesh.axes), torch.no_grad():
                high, low = (
                    pmax(value.detach(), found.places[name].equal),
                    pmin(value.detach(), found.places[name].equal),
                )
                spread[name] = float(pmax(_ulps(high, low), tuple(mesh.axes)))
    return spread


def _ulps(high: Tensor, low: Tensor) -> Tensor:
    """The largest distance, 0-d float64; infinite where only some ranks have NaN or an infinity."""
    size, least = torch.maximum(high.abs(), low.abs()).double(), torch.finfo(high.dtype)
    _, exponent = torch.frexp(size.clamp(min=least.tiny))
    ulps = (high.double() - low.double()) / torch.ldexp(torch.full_like(size, least.eps / 2), exponent)
    return torch.where(high.double() == low.double(), 0.0, ulps.nan_to_num(math.inf, math.inf)).max()
