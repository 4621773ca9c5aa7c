"""The host waits for a device in one file of the shell, which hears of failed ranks meanwhile.

A message of a rank that has failed never ends on a device, so any other wait may be without end. `float(x)` and `bool(x)` of a tensor
cannot be told from those of a number here; in steps tests/goldens/test_host_reads.py finds them, by tensors without data.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
METHODS = {"item", "tolist", "cpu", "numpy", "synchronize"}
# What reads values elsewhere, how often, and why that is no wait for a message.
ALLOWED = {
    "records/_device_reads.py": 4,  # the file
    "records/_record.py": 2,  # a number of the host, and a loss on it
    "records/_compare.py": 2,  # before the first step, and in a save
    "checkpoint": 4,  # copies for files
    "groups": 4,  # numbers of ranks, on the host; and a mesh without other ranks
    "jax/_optax.py": 1,  # arrays of the host
    "loading": 4,  # random numbers of the host
    "optim/_optimizer.py": 1,  # torch's own GradScaler reads it too
    "optim/_param_groups.py": 1,  # counts of states that are loaded
    "optim/_zero_state.py": 1,  # sizes and flags are copied to a device
    "shared_memory": 1,  # memory of the host
    "step/_records.py": 1,  # of DeviceReads
    "step/_verdict.py": 6,  # values of the host, and the error of a step on which the host has decided; of DeviceReads
    "testing": 1,
    "training/_metrics.py": 1,  # a number of steps, on the host
    "training/_passes.py": 1,  # the scale of a 16-bit loss in an accumulation window
}


def waits(tree: ast.AST) -> Iterator[int]:
    """The lines of calls that read a tensor's values, or copy one to a device where the host waits."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        to_device = node.func.attr == "tensor" and any(keyword.arg == "device" for keyword in node.keywords)
        if (node.func.attr in METHODS and not node.args) or to_device:
            yield node.lineno


def test_files_wait_only_where_they_may() -> None:
    found: dict[str, dict[str, list[int]]] = {}  # by the key of ALLOWED
    for path in sorted((ROOT / "fjoin").rglob("*.py")):
        name = path.relative_to(ROOT / "fjoin").as_posix()
        if not name.startswith("transforms") and (lines := list(waits(ast.parse(path.read_text())))):
            room = next((key for key in ALLOWED if name == key or name.startswith(f"{key}/")), None)
            assert room is not None, (
                f"{name} reads values of tensors in the lines {lines}; see fjoin/records/_device_reads.py"
            )
            found.setdefault(room, {})[name] = lines
    for room, files in found.items():
        assert sum(len(set(lines)) for lines in files.values()) == ALLOWED[room], files


def test_a_wait_is_seen() -> None:
    text = (
        "a.item()\nb.sum().tolist()\nc.cpu()\ntorch.tensor([1.0], device=d)\nd.items()\ntorch.tensor(1.0)\ne.item(3)\n"
    )
    assert list(waits(ast.parse(text))) == [1, 2, 3, 4]
