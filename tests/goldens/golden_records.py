"""One row's training in lockstep, on values that are the same bits on every machine; and what is kept of it: rounded
values, names of the state, hashes of all bits; its explanation, its spec, its fingerprint."""

from __future__ import annotations

import hashlib
import itertools
import json
import platform
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fjoin import transforms as tx
from fjoin.transforms.base import specs
from tests.goldens.golden_rows import ROWS, WORLDS, Row

HERE = Path(__file__).parent
# Leaves that lie across a cut, are smaller than a piece, are 0-d, or have no elements.
SHAPES = {"layer.weight": (3, 4), "layer.bias": (3,), "w": (2,), "scale": (), "none": (0, 2)}
STEPS = 5
# A rank's weight in a step. Powers of two make weighted gradients exact; with 0 a rank has no input.
WEIGHTS = {"powers": (1.0, 2.0, 4.0), "odd": (3.0, 5.0, 0.0)}


def _tree(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Hundredths, which are rounded alike everywhere, where a normal distribution is not."""
    g = torch.Generator().manual_seed(seed)
    return {
        path: (torch.randint(-200, 201, shape, generator=g).double() / 100).to(dtype) for path, shape in SHAPES.items()
    }


def start(dtype: torch.dtype) -> dict[str, Tensor]:
    return _tree(1, dtype)


def places(row: Row) -> list[tuple[int, ...]]:
    """The place of each rank on the axes, in rank order."""
    return list(itertools.product(*map(range, row.axes.values())))


def steps(row: Row, weights: str, rank: int) -> Iterator[tuple[Any, Any]]:
    """On one rank: the parameters and the state after each step."""
    pipeline, params = row.make(), start(row.dtype)
    state = pipeline.init(params)
    for step in range(STEPS):
        grads = _tree(1000 + 100 * rank + step, row.dtype)
        if row.poisoned and (rank, step) == (1, 2):
            grads["layer.weight"][1, 1] = float("inf")
        if hasattr(state, "scale"):  # of the loss
            grads = {path: g * state.scale.to(g.dtype) for path, g in grads.items()}
        params, state = pipeline.step(params, grads, state, weight=WEIGHTS[weights][(rank + step) % 3])
        yield params, state


def run(name: str, weights: str) -> list[Any]:
    """What each rank sees."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of pipelines that do not reduce, which are rows too
        row = ROWS[name]
        return tx.simulate(lambda rank: list(steps(row, weights, rank)), row.axes, list(range(len(places(row)))))


def machine() -> str:
    """What decides on bits: two machines with the same text give the same."""
    vendor = "no vendor"
    if (info := Path("/proc/cpuinfo")).exists():
        vendor = next((x.split(":")[1].strip() for x in info.read_text().splitlines() if "vendor_id" in x), vendor)
    python = ".".join(platform.python_version_tuple()[:2])
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {vendor}, Python {python}"


def _hash(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


def digest(value: Any) -> str:
    """Of a tensor's dtype, shape and bytes; or of a number."""
    if not isinstance(value, Tensor):
        return _hash(repr(value))
    head = f"{value.dtype} {tuple(value.shape)}".encode()
    flat = value.detach().contiguous().reshape(-1)
    return _hash(head + bytes(flat.view(torch.uint8).tolist() if flat.numel() else []))


def _digest_of(tree: dict[str, Any]) -> str:
    return _hash("".join(f"{name} {digest(tree[name])}" for name in sorted(tree)))


def _rounded(params: dict[str, Tensor]) -> dict[str, list[float]]:
    return {path: [float(f"{x:.6g}") for x in p.double().reshape(-1).tolist()] for path, p in sorted(params.items())}


def recorded_now(name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The names of the state, and the last parameters of each rank, or of all where they are equal; and the hashes of each case:
    4 digits for the parameters of each step, 3 for each name of the last state."""
    values, bits, names = {}, {}, set[str]()
    for case in sorted(WEIGHTS):
        found = run(name, case)
        states = [tx.to_state_dict(one[-1][1]) for one in found]
        # A step's id is that of its place among all steps of the program.
        kept = [{n: digest(0 if n.endswith(".step_id") else value) for n, value in state.items()} for state in states]
        names = {n for state in kept for n in state}
        rounded = [_rounded(one[-1][0]) for one in found]
        values[case] = rounded[:1] if all(json.dumps(one) == json.dumps(rounded[0]) for one in rounded) else rounded
        of_steps = zip(*([_digest_of(params) for params, _ in one] for one in found), strict=True)
        of_names = ("".join(state.get(n, "") for state in kept) for n in sorted(names))
        shorts = ("".join(_hash("".join(ranks))[:4] for ranks in of_steps), "".join(_hash(x)[:3] for x in of_names))
        bits[case] = " ".join(shorts)
    return {"names": sorted(names), "values": values}, bits


def worlds_of(name: str) -> list[dict[str, int]]:
    return [world for world in WORLDS if world.keys() == ROWS[name].axes.keys()]


def explained(name: str) -> dict[str, str]:
    """World -> the table as text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        texts = {
            str(world): str(tx.explain(ROWS[name].make(), start(ROWS[name].dtype), world, bucket_bytes=24))
            for world in worlds_of(name)
        }
    return {world: re.sub(" {3,}", "  ", text) for world, text in texts.items()}


def plan(name: str) -> dict[str, Any]:
    """The pipeline as it prints, and its fingerprint; of functions none, since it is that of the code as Python compiles it."""
    made = ROWS[name].make()
    holds = '"function"' in json.dumps(specs.encode(made))
    return {"spec": repr(made), "fingerprint": "holds functions" if holds else specs.fingerprint(made)}


def load(name: str, folder: Path = HERE) -> Any:
    file = folder / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def save(name: str, content: Any, folder: Path = HERE) -> None:
    """One line for each entry of the two upper levels, with sorted names."""
    lines = []
    for key, rows in sorted(content.items()):
        inner = [
            f"  {json.dumps(k)}: {json.dumps(v, sort_keys=True, separators=(',', ':'))}"
            for k, v in sorted(rows.items())
        ]
        lines.append(f" {json.dumps(key)}: {{\n" + ",\n".join(inner) + "\n }")
    (folder / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
