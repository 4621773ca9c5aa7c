"""Checks that all ranks run the same program on the same tensors, made before the first payload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .._errors import DesyncError
from ..groups._mesh import Mesh
from ..transforms.pipelines._pipeline import Pipeline
from ..transforms.transform._transform import Transform
from ._replicas import Replicas, form


def check_program(
    mesh: Mesh,
    pipeline: Pipeline,
    on_buffers: Transform | None,
    params: Mapping[str, Tensor],
    bucket_bytes: int,
    accumulate: int,
    weighs: str,
    buffers: Mapping[str, Tensor] | None,
    sync: str | None,
) -> None:
    """Raise on all ranks, before any payload, unless they run the same program on the same shapes.

    Raises:
        DesyncError: naming the ranks that differ from the majority, and the part of the program that differs.
    """
    mine = {
        "pipeline": pipeline.spec.canonical(),
        "parameters": _describe(params),
        "buffers": _describe(buffers or {}),
        "transform of buffers": "none" if on_buffers is None else on_buffers.spec.canonical(),
        "mesh": str(mesh.shape),
        "bucket_bytes": bucket_bytes,
        "accumulate": accumulate,
        "weight": weighs,
        "sync": repr(sync),
    }
    shown = {**mine, "pipeline": repr(pipeline), "transform of buffers": repr(on_buffers)}
    problem = mesh.exchange("step.init", [mine, shown], _compare)
    if problem:
        raise DesyncError(problem[1], rank=problem[0])


def same_average(mesh: Mesh, averager: str, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor] | None) -> None:
    """Raise on all ranks, before any payload, unless they average the same tensors in the same steps.

    Raises:
        DesyncError: naming the ranks that differ from the majority, and the part that differs.
    """
    mine = {"averager": averager, "parameters": _describe(params), "buffers": _describe(buffers or {})}
    if problem := mesh.exchange("the first average of parameters", [mine, mine], _compare):
        raise DesyncError(problem[1], rank=problem[0])


def _describe(tensors: Mapping[str, Tensor]) -> list[str]:
    return [f"{path}: {str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for path, t in tensors.items()]


def _compare(values: list[Any]) -> Any:
    for part in values[0][0]:
        texts = [str(mine[part]) for mine, _ in values]
        usual = Counter(texts).most_common(1)[0][0]
        odd = [rank for rank, text in enumerate(texts) if text != usual]
        if odd:
            like = texts.index(usual)
            there, here = values[odd[0]][1][part], values[like][1][part]
            if isinstance(there, list):
                there, here = _first_difference(there, here)
            ranks = ", ".join(map(str, odd))
            return [
                odd[0],
                f"rank {ranks} differs from rank {like} in its {part}: {there} there, {here} on rank {like}. "
                f"Nothing has been sent; run the same program with the same settings on all ranks",
            ]
    return None


def _first_difference(a: list[str], b: list[str]) -> tuple[str, str]:
    for x, y in zip(a, b, strict=False):
        if x != y:
            return x, y
    return (f"{len(a)} of them", f"{len(b)}")


def same_values(mesh: Mesh, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor] | None) -> None:
    """Raise on all ranks unless parameters and buffers are equal to the bit.

    Raises:
        DesyncError: naming a rank and the first tensor that differs.
    """
    values = {**params, **(buffers or {})}
    replicas = Replicas(dict.fromkeys(values, "all"), {path: form(value) for path, value in values.items()})
    for path, (rank, other) in replicas.apart(mesh, "step.init", values).items():
        raise DesyncError(
            f"{path!r} has other values on rank {rank} than on rank {other}; use init(params, sync='broadcast'), or the same seed on all "
            f"ranks",
            rank=rank,
        )
