"""Evaluation over uneven shards: every sample counts once."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._errors import DesyncError
from ..groups import Communicator, Mesh, mesh_or_world
from ..records import read_now
from ..training import weigh
from ..transforms.base import checks, trees
from ._loop import Loop


class Evaluation(NamedTuple):
    """The result of `evaluate`, the same on all ranks.

    Attributes:
        means: Name -> the mean over all batches of all ranks, by weight: a float, or a float64 tensor of the metric's
            shape. NaN where the sum of the weights is 0.
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
            under "sum" are summed instead. Called without gradients. It must not communicate, but for a `Loop`.
        loader: This rank's batches; any number, 0 included. For a model that communicates, such as one under
            fully_shard, a `Loop`: `fjoin.join(batches, weight=...)`, whose weights are taken; batches of weight 0
            are not counted.
        mesh: The ranks; by default all ranks.
        weight: `batch -> float`, the batch's weight in the means: its samples, its tokens. By default 1, or the loop's.

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
        checks.iterable("loader", loader)
        found = mesh.exchange("fjoin.evaluate", _go_through(metric_fn, loader, weight, mesh), _combine)
    except BaseException as error:
        mesh.raise_root_cause(error, None)
    if "problem" in found:
        raise DesyncError(found["problem"], rank=found["rank"])
    total, named = found["weight"], {MEANS: dict[str, Any](), SUMS: dict[str, Any]()}
    for kind, name, shape, values in found["metrics"]:
        value = torch.tensor(values, dtype=torch.float64).view(shape)
        if kind == MEANS:
            value = value / total if total else value * torch.nan
        named[kind][name] = value if shape else float(value)
    return Evaluation(named[MEANS], named[SUMS], total, found["batches"])


MEANS, SUMS = "means", "sums"  # the kinds of metrics


def _go_through(
    metric_fn: Callable[[Any], dict[str, Any]],
    loader: Iterable[Any],
    weight: Callable[[Any], float] | None,
    mesh: Communicator,
) -> dict[str, Any]:
    """This rank's sums over its batches: [kind, name, shape, values] of each metric, the weight and the number of
    batches.
    """
    sums: dict[tuple[str, str], Tensor] = {}
    total, batches, loop = 0.0, 0, loader if isinstance(loader, Loop) else None
    if loop is not None and weight is not None:
        raise TypeError("the loop has weights already; write fjoin.join(batches, weight=...)")
    with torch.no_grad():
        for batch in loader:
            metrics = _metrics(metric_fn(batch))
            if loop is not None and not loop.weight:  # a batch that is repeated, for the ranks that have another one
                continue
            w = weigh(weight, batch) if loop is None else loop.weight
            now, before = ({key: tuple(value.shape) for key, value in some.items()} for some in (metrics, sums))
            if batches and now != before:
                raise ValueError(f"metric_fn returned metrics of the shapes {now}, before that {before}")
            for key, value in metrics.items():
                # A batch of weight 0 adds nothing, even where its mean is nan: 0 * nan would be nan. Sums stay on their
                # device, so that the host waits once, at the end.
                factor, so_far = w if key[0] == MEANS else 1.0, sums[key] if batches else torch.zeros_like(value)
                sums[key] = so_far + (trees.to_device(so_far.device, value) * factor if factor else 0.0)
            total, batches = total + w, batches + 1
    sent = [[*key, list(value.shape), read_now(mesh, value.flatten())] for key, value in sorted(sums.items())]
    return {"metrics": sent, "weight": total, "batches": batches}


def _metrics(out: Any) -> dict[tuple[str, str], Tensor]:
    """(kind, name) -> float64 tensor.

    Raises:
        TypeError: `metric_fn` returned something else than real numbers and tensors by name.
    """
    if not isinstance(out, dict) or not isinstance(out.get("sum", {}), dict):
        raise TypeError(
            f"metric_fn must return a dict name -> mean over the batch, with a dict name -> number under 'sum', got {out!r}"
        )
    given = {(MEANS, name): value for name, value in out.items() if name != "sum"}
    given |= {(SUMS, name): value for name, value in out.get("sum", {}).items()}
    for (_, name), value in given.items():
        real = not value.is_complex() if isinstance(value, Tensor) else isinstance(value, numbers.Real)
        if not (isinstance(name, str) and real):
            raise TypeError(f"a metric is a string with a real number or a tensor of them, got {name!r}: {value!r}")
    plain = {key: value if isinstance(value, Tensor) else float(value) for key, value in given.items()}
    return {key: torch.as_tensor(value, dtype=torch.float64).detach() for key, value in plain.items()}


def _combine(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The sums over all ranks, in rank order."""
    known = {rank: one["metrics"] for rank, one in enumerate(ranks) if one["batches"]}
    forms = {rank: [metric[:3] for metric in metrics] for rank, metrics in known.items()}
    for rank, own in forms.items():
        if own != (first := next(iter(forms.values()))):
            text = f"metric_fn returned {own} on rank {rank}, but {first} on rank {next(iter(forms))}; they must be the same"
            return {"rank": rank, "problem": text}
    metrics = []
    for some in zip(*known.values(), strict=True):  # one metric of all ranks
        columns = zip(*(values for *_, values in some), strict=True)
        metrics.append([*some[0][:3], [sum(column) for column in columns]])
    return {"metrics": metrics} | {name: sum(one[name] for one in ranks) for name in ("weight", "batches")}
