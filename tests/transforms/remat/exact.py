"""Pinned memory of the host, for values on the CPU: they wait there and come back to the bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fjoin.transforms.rematerialization._offload import Abstract, Handle, Host, is_abstract


class _Held(Handle):
    where = "cpu"

    def __init__(self, x: Tensor) -> None:
        self._x = x.detach().clone()

    def get(self) -> Tensor:
        return self._x.clone()


def _put(host: Host, values: Sequence[Tensor]) -> list[Any]:
    with torch._C.DisableTorchFunction():
        return [Abstract(x, "cpu") if is_abstract(x) else _Held(x) for x in values]


@contextlib.contextmanager
def exact_host() -> Iterator[None]:
    """A context in which `offload="cpu"` takes values on the CPU too."""
    with mock.patch.object(Host, "put", _put):
        yield
