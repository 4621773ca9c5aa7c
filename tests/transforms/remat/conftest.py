"""Values on the CPU may wait on the host, where a test says so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .exact import exact_host


@pytest.fixture
def host() -> Iterator[None]:
    with exact_host():
        yield
