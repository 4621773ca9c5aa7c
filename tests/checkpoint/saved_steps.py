"""Small checkpoints, and files that are forged."""

from __future__ import annotations

import hashlib
import json
import uuid
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fjoin
from fjoin.checkpoint._files import write_file
from fjoin.checkpoint._folder import Folder
from fjoin.checkpoint._load import chosen
from fjoin.checkpoint._manifest import Leaf, LeafPart, Manifest

RUN = "a" * 32


def a_state(seed: int = 0) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {
        "params.w": torch.randn(40, 30, generator=made),
        "params.b": torch.randn(30, dtype=torch.complex128, generator=made),
        "steps": torch.tensor(3.0),
        "scales": torch.ones(4, dtype=torch.float64),
    }


def new_manifest(step: int, parent: str = "", run: str = RUN, **given: Any) -> Manifest:
    return Manifest(run, uuid.uuid4().hex, step, parent, axes={"data": 2}, **given)


def fill(folder: Path, step: int, parent: str = "", run: str = RUN, seed: int = 0) -> Manifest:
    """Write the files of a step with whole leaves, one of each rank, and pieces, and return its manifest."""
    state = a_state(seed)
    rest = [torch.full((5,), float(rank + seed)) for rank in range(2)]
    flat = torch.arange(12.0) + seed
    files = [
        write_file(folder / "rank-0.safetensors", state | {"error@rank-0": rest[0], "params.m@0": flat[:7]}),
        write_file(folder / "rank-1.safetensors", {"error@rank-1": rest[1], "params.m@7": flat[7:]}),
    ]
    leaves = {name: Leaf(list(t.shape), str(t.dtype)[6:], {}, [LeafPart(0, name)]) for name, t in state.items()}
    leaves["error"] = Leaf([5], "float32", {}, [LeafPart(rank, f"error@rank-{rank}", rank) for rank in range(2)])
    leaves["params.m"] = Leaf(
        [3, 4], "float32", {"cut": "data"}, [LeafPart(0, "params.m@0", 0, 0), LeafPart(1, "params.m@7", 1, 7)]
    )
    numbers, ranks = {"calls": [step], "each": [1, 2.5]}, [{"batches": 3, "seed": 2**127}, {"batches": 4}]
    given: dict[str, Any] = {"spec": ["mean('data')", None, True], "notes": ["ü"], "extra": {"a": [1, {"b": '\n"'}]}}
    return new_manifest(step, parent, run, files=files, leaves=leaves, numbers=numbers, ranks=ranks, **given)


def newest(folder: Folder) -> Manifest | None:
    """The manifest of the newest step of which every byte verifies, as a load chooses it."""
    found = chosen(folder, fjoin.mesh({"data": 1}), None)
    if found is None:
        return None
    found.close()
    return found.manifest


def save(folder: Folder, step: int, run: str = RUN, seed: int = 0) -> Path:
    """Save a step after those that are there."""
    steps = folder.steps()
    parent = folder.read(steps[-1])[1].id if steps else ""
    temporary = folder.begin(step)
    return folder.commit(temporary, fill(temporary, step, parent, run, seed))


def put(*path: Any) -> Callable[[Any], None]:
    """Sets the value at a path, of which it is the last item."""

    def change(value: Any) -> None:
        *way, key, new = path
        for one in way:
            value = value[one]
        value[key] = new

    return change


def forge(step: Path, name: str, new: Any) -> None:
    """Change the manifest, or put another text or file in its place, with checksums that fit."""
    data = (step / "manifest.json").read_bytes()
    manifest = json.loads(data)
    if name != "manifest.json":
        (entry,) = (one for one in manifest["files"] if one["name"] == name)
        entry |= {"size": len(new), "blocks": [zlib.crc32(new)]}
        (step / name).write_bytes(new)
    if callable(new):
        new(manifest)
    data = new if name == "manifest.json" and isinstance(new, bytes) else json.dumps(manifest).encode()
    commit = json.loads((step / "COMMIT").read_bytes()) | {"sha256": hashlib.sha256(data).hexdigest()}
    (step / "manifest.json").write_bytes(data)
    (step / "COMMIT").write_text(json.dumps(commit) + "\n")
