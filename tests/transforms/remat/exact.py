"""Pinned memory of the host, for values on the CPU: they wait there and come back to the bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fjoin.transforms.rematerialization._offload import Host, Stashed


def _put(host: Host, values: Sequence[Tensor]) -> list[Any]:
    with torch._C.DisableTorchFunction():
        return [Stashed(x.detach().clone()) for x in values]


@contextlib.contextmanager
def exact_host() -> Iterator[None]:
    """A context in which `offload="cpu"` takes values on the CPU too."""
    with mock.patch.object(Host, "put", _put):
        yield


@pytest.fixture
def host() -> Iterator[None]:
    with exact_host():
        yield
