"""Evaluation over uneven shards: every sample counts once."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._errors import DesyncError
from ..agreement import read_now
from ..groups import Communicator, Mesh, mesh_or_world
from ..training import weigh
from ..transforms.base import iterable, to_device


class Evaluation(NamedTuple):
    """The result of `evaluate`, the same on all ranks.

    Attributes:
        means: Name -> the mean over all batches of all ranks, by weight: a float, or a float64 tensor of the metric's shape. NaN
            where the sum of the weights is 0.
        sums: Name -> the sum over all batches of all ranks, of the values under "sum".
        weight: The sum of the weights of all batches of all ranks.
        batches: The number of batches of all ranks.
    """

    means: dict[str, Any]
    sums: dict[str, Any]
    weight: float
    batches: int


def evaluate(
    metric_fn: Callable[[Any], dict[str, Any]],
    loader: Iterable[Any],
    *,
    mesh: Mesh | None = None,
    weight: Callable[[Any], float] | None = None,
) -> Evaluation:
    """The mean of metrics over the loaders of all ranks, exact for any number and size of batches.

        sum_b w_b m_b / sum_b w_b      over the batches b of all ranks

    Ranks go through their own loaders without waiting for each other and meet once, at the end. No sample
    is repeated or left out, unlike with a sampler that pads.

    Args:
        metric_fn: `batch -> {name: mean over the batch}`, numbers or tensors of any shape; the values of the dict
            under "sum" are summed instead. Called without gradients. It must not communicate.
        loader: This rank's batches; any number, 0 included.
        mesh: The ranks; by default all ranks.
        weight: `batch -> float`, the batch's weight in the means: its samples, its tokens. By default 1.

    Returns:
        An `Evaluation`, equal on all ranks to the bit.

    Raises:
        ValueError, TypeError: `metric_fn` or `weight` returned an unusable value.
        DesyncError: on all ranks: other names on some rank.
        PeerLost, CollectiveTimeout: another rank failed, or did not arrive in time.

    >>> batches = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([6.0])]
    >>> fjoin.evaluate(lambda x: {"mean": x.mean(), "sum": {"n": len(x)}}, batches, weight=len)
    Evaluation(means={'mean': 3.0}, sums={'n': 4.0}, weight=4.0, batches=2)
    """
    mesh = mesh_or_world("evaluate", mesh)
    try:
        if not callable(metric_fn):
            raise TypeError(f"metric_fn must be a function of a batch, got {metric_fn!r}")
        iterable("loader", loader)
        mine = _go_through(metric_fn, loader, weight, mesh)
        found = mesh.exchange("fjoin.evaluate", mine, _combine)
    except BaseException as error:
        mesh.raise_root_cause(error, None)
    if "problem" in found:
        raise DesyncError(found["problem"], rank=found["rank"])
    weighted, sums = _tensors(found["means"]), _tensors(found["sums"])
    total = found["weight"]
    means = {name: value / total if total else value * torch.nan for name, value in weighted.items()}
    return Evaluation(_plain(means), _plain(sums), total, found["batches"])


def _go_through(
    metric_fn: Callable[[Any], dict[str, Any]],
    loader: Iterable[Any],
    weight: Callable[[Any], float] | None,
    mesh: Communicator,
) -> dict[str, Any]:
    means: dict[str, Tensor] = {}
    sums: dict[str, Tensor] = {}
    total, batches = 0.0, 0
    with torch.no_grad():
        for batch in loader:
            w, out = weigh(weight, batch), metric_fn(batch)
            if not isinstance(out, dict):
                raise TypeError(f"metric_fn must return a dict name -> mean over the batch, got {out!r}")
            own, summed = {name: value for name, value in out.items() if name != "sum"}, out.get("sum", {})
            if not isinstance(summed, dict):
                raise TypeError(f"metric_fn must return a dict name -> number under 'sum', got {summed!r}")
            for into, values, factor in ((means, own, w), (sums, summed, 1.0)):
                if batches and values.keys() != into.keys():
                    raise ValueError(f"metric_fn returned the names {sorted(values)}, before that {sorted(into)}")
                for name, value in values.items():
                    wide = _number(name, value)
                    if name in into and into[name].shape != wide.shape:
                        raise ValueError(
                            f"the metric {name!r} has shape {tuple(wide.shape)}, before that {tuple(into[name].shape)}"
                        )
                    # A batch of weight 0 adds nothing, even where its mean is nan: 0 * nan would be nan. Sums stay on their
                    # device, so that the host waits once, at the end.
                    before = into.get(name, torch.zeros_like(wide))
                    into[name] = before + (to_device(before.device, wide) * factor if factor else 0.0)
            total, batches = total + w, batches + 1
    return {"means": _sent(means, mesh), "sums": _sent(sums, mesh), "weight": total, "batches": batches}


def _number(name: Any, value: Any) -> Tensor:
    """A metric as a float64 tensor.

    Raises:
        TypeError: its name is no string, or it is no real number or tensor.
    """
    if isinstance(name, str) and isinstance(value, Tensor) and not value.is_complex():
        return value.detach().to(torch.float64)
    if not (isinstance(name, str) and isinstance(value, numbers.Real)):
        raise TypeError(f"a metric is a string with a real number or a tensor of them, got {name!r}: {value!r}")
    return torch.tensor(float(value), dtype=torch.float64)


def _combine(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The sums over all ranks, in rank order."""
    known = [(rank, one) for rank, one in enumerate(ranks) if one["batches"]]
    names = [
        [sorted((name, shape) for name, (shape, _) in one[kind].items()) for kind in ("means", "sums")]
        for _, one in known
    ]
    for (rank, _), own in zip(known, names, strict=True):
        if own != names[0]:
            return {
                "rank": rank,
                "problem": f"metric_fn returned the names and shapes {own} on rank {rank}, but {names[0]} on rank "
                f"{known[0][0]}; they must be the same",
            }
    out: dict[str, Any] = {
        "weight": sum(one["weight"] for one in ranks),
        "batches": sum(one["batches"] for one in ranks),
    }
    for kind in ("means", "sums"):
        added: dict[str, Tensor] = {}
        for _, one in known:
            for name, value in _tensors(one[kind]).items():
                added[name] = added[name] + value if name in added else value
        out[kind] = _sent(added)
    return out


def _sent(values: dict[str, Tensor], mesh: Communicator | None = None) -> dict[str, Any]:
    return {name: [list(value.shape), read_now(mesh, value.flatten())] for name, value in values.items()}


def _tensors(values: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.tensor(flat, dtype=torch.float64).view(shape) for name, (shape, flat) in values.items()}


def _plain(values: dict[str, Tensor]) -> dict[str, Any]:
    return {name: value if value.dim() else float(value) for name, value in values.items()}
