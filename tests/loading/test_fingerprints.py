"""The checksum of the batch that a position has loaded ahead: of batches of any type, the same in another process."""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import torch

import fjoin


class Slots:
    __slots__ = ("a",)

    def __init__(self, a: Any) -> None:
        self.a = a


class Graph:
    """With a circle."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.edges, self.me = x, [torch.arange(4)], self


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    names: list[str]


class Fails:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


Named = collections.namedtuple("Named", "a b")
Kind = enum.Enum("Kind", "A B")


def batches(i: int) -> dict[str, Any]:
    """Batches that differ by `i` in one place."""
    x = torch.ones(3, 2)
    x[2, 1] += i
    late = torch.zeros(64, 3)
    late[-1, -1] = i
    return {
        "tensor": x, "expanded": x[2, 1].expand(20, 20), "its last element": late,
        "bool": x > 1, "bfloat16, transposed": x.bfloat16().T, "complex": x * 1j,
        "fp8": x.to(torch.float8_e4m3fn), "dict": {"b": x, 1: "x"}, "nested": [[{"a": (x,)}]], "dataclass": Pair(x, ["a"]),
        "its text": Pair(x[:1], ["a", str(i)]), "graph": Graph(x), "named": Named(1, x),
        "packed": torch.nn.utils.rnn.pack_sequence([x, x[:2]]), "array": x.numpy(),
        "array of objects": np.array([None, str(i)], dtype=object), "array of text": np.array(["a", str(i)]),
        "scalar": np.float32(i), "texts": ["a", str(i)], "bytes": b"a" * (3 + i), "number": i, "nan": [float("nan"), i],
        "enum": [*Kind][i], "shape": torch.zeros(i, 2), "dtype": torch.ones(2, dtype=[torch.float32, torch.int32][i]),
    }  # fmt: skip


def of_a_type_alone() -> dict[str, Any]:
    x = torch.ones(3, 2)
    return {
        "sparse": x.to_sparse(), "set": {1, 2}, "jagged": torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged),
        "large": x[0, 0].expand(2**20, 2**20),
        "slots": Slots(x), "function": batches, "module": torch.nn.Linear(2, 2), "meta": x.to("meta"), "None": None,
        "fails": Fails(),
    }  # fmt: skip


def checksums(i: int) -> dict[str, Any]:
    """Of the batch behind the first one."""
    found = {}
    for name, batch in (batches(i) | of_a_type_alone()).items():
        loop = fjoin.join([0, batch], mesh=fjoin.mesh({"data": 1}))
        for _ in loop:
            found[name] = loop.state_dict()["ahead"]
            loop.stop()
    return found


def test_another_content_has_another_checksum() -> None:
    one, other = checksums(0), checksums(1)
    assert one == checksums(0)
    assert {name for name in one if one[name] == other[name]} == of_a_type_alone().keys()
    assert {name for name in one if one[name] is None} == {"fails"}


def test_another_process_has_the_same() -> None:
    script = "import json; from tests.loading.test_fingerprints import checksums; print(json.dumps(checksums(0)))"
    env = os.environ | {"PYTHONHASHSEED": "3", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True, timeout=120
    )
    assert json.loads(done.stdout.splitlines()[-1]) == checksums(0)
