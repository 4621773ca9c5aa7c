"""Names that the doctests use without importing them, and quiet threads."""

import os
from typing import Any

import pytest
import torch

import fjoin

torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: tests of failures and time-outs mostly wait."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update(torch=torch, fjoin=fjoin)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
