"""What is kept of a run: hashes of all bits, rounded values, names of the state, messages."""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.goldens.golden_problem import SHAPES

HERE = Path(__file__).parent
# Of which other path a path's records name only the differences.
REFERENCE = {"gloo": "pure", "registered": "gloo"}
EMPTY: dict[str, Any] = {"error": [None], "names": [], "messages": [{}], "values": [{}], "losses": [[]]}
Records = dict[str, list[dict[str, Any]]]  # case -> what every rank saw


def machine() -> str:
    """What decides on bits: two machines with the same text give the same."""
    vendor = "no vendor"
    if (info := Path("/proc/cpuinfo")).exists():
        vendor = next((x.split(":")[1].strip() for x in info.read_text().splitlines() if "vendor_id" in x), vendor)
    python = ".".join(platform.python_version_tuple()[:2])
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {vendor}, Python {python}"


def digest(value: Any) -> str:
    """Of a tensor's dtype, shape and bytes; or of a number."""
    if not isinstance(value, Tensor):
        return hashlib.sha256(repr(value).encode()).hexdigest()
    head = f"{value.dtype} {tuple(value.shape)}".encode()
    flat = value.detach().contiguous().reshape(-1)
    return hashlib.sha256(head + bytes(flat.view(torch.uint8).tolist() if flat.numel() else [])).hexdigest()


def digest_of(tree: dict[str, Any]) -> str:
    return hashlib.sha256("".join(f"{name} {digest(tree[name])}" for name in sorted(tree)).encode()).hexdigest()


def rounded(values: Tensor | list[float]) -> list[float]:
    flat = values.double().reshape(-1).tolist() if isinstance(values, Tensor) else values
    return [float(f"{x:.6g}") for x in flat]


def kept(seen: dict[str, Any]) -> dict[str, Any]:
    """What a rank reports of its run: plain data."""
    params, state = seen.pop("params"), seen.pop("state", {})
    return seen | {
        "steps": [digest_of(p) for p in params],
        # A step's id is that of its place among all steps of the program.
        "state": {name: digest(0 if name.endswith(".step_id") else value) for name, value in state.items()},
        "values": {path: rounded(p) for path, p in sorted(params[-1].items())} if params else {},
        "losses": [rounded(step) for step in seen["losses"]],
    }


def _by_rank(values: list[Any]) -> list[Any]:
    """One value where all ranks have the same."""
    return values[:1] if all(json.dumps(v) == json.dumps(values[0]) for v in values) else values


def _changes(messages: list[list[str]]) -> dict[str, list[str]]:
    """The messages of the steps in which they differ from those of the step before."""
    return {str(step): sent for step, sent in enumerate(messages) if not step or sent != messages[step - 1]}


def short_names(names: list[str]) -> list[str]:
    """Names of the state; those of all parameters as one, with * for the parameter."""
    found, left = [], set(names)
    for name in sorted(names):
        for path in sorted(SHAPES):
            parts = f".{name}.".split(f".{path}.")
            if name in left and len(parts) == 2:
                whole = {f"{parts[0]}.{other}.{parts[1]}".strip(".") for other in SHAPES}
                if whole <= left:
                    left -= whole
                    found.append(f"{parts[0]}.*.{parts[1]}".strip("."))
    return sorted([*found, *left])


def of_ranks(records: Records) -> tuple[dict[str, Any], dict[str, str]]:
    """What is written of a row on one path: for each case the fields; and the hashes."""
    fields, bits = {}, {}
    for case, ranks in records.items():
        names = sorted({name for rank in ranks for name in rank["state"]})
        fields[case] = {
            "error": _by_rank([rank["error"] for rank in ranks]),
            "names": short_names(names),
            "messages": _by_rank([_changes(rank["messages"]) for rank in ranks]),
            "values": _by_rank([rank["values"] for rank in ranks]),
            "losses": _by_rank([rank["losses"] for rank in ranks]),
        }
        steps = zip(*(rank["steps"] for rank in ranks), strict=False)
        of_names = ("".join(rank["state"].get(name, "") for rank in ranks) for name in names)
        bits[case] = " ".join(
            ["".join(_short(each, 4) for each in map("".join, steps)), "".join(_short(each, 3) for each in of_names)]
        )
    return fields, bits


def _short(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def packed(fields: dict[str, Any], other: dict[str, Any] | None) -> dict[str, Any]:
    """Without the fields that are those of the first case, and with "same" for those of the reference path."""
    first, out = min(fields), {}
    for case, own in sorted(fields.items()):
        known = EMPTY if case == first else fields[first]
        out[case] = {
            name: "same" if other and value == other.get(case, {}).get(name) else value
            for name, value in own.items()
            if value != known[name]
        }
    return out


def unpacked(stored: dict[str, Any], other: dict[str, Any] | None) -> dict[str, Any]:
    """The opposite of `packed`."""
    out: dict[str, Any] = {}
    for case, own in sorted(stored.items()):
        out[case] = (out[min(out)] if out else EMPTY) | {
            name: other[case][name] if other and value == "same" else value for name, value in own.items()
        }
    return out


def recorded(path: str, folder: Path | None = None) -> dict[str, Any]:
    """Row -> case -> fields, as recorded."""
    other = recorded(REFERENCE[path], folder) if path in REFERENCE else {}
    return {name: unpacked(row, other.get(name)) for name, row in load(path, folder).items()}


def load(name: str, folder: Path | None = None) -> Any:
    file = (folder or HERE) / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def save(name: str, content: Any, folder: Path = HERE) -> None:
    """One line for each entry of the two upper levels, with sorted names."""
    lines = []
    for key, rows in sorted(content.items()):
        if isinstance(rows, dict):
            inner = [
                f"  {json.dumps(k)}: {json.dumps(v, sort_keys=True, separators=(',', ':'))}"
                for k, v in sorted(rows.items())
            ]
            lines.append(f" {json.dumps(key)}: {{\n" + ",\n".join(inner) + "\n }")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(rows)}")
    (folder / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
