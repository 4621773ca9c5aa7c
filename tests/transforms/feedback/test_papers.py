"""The methods of examples/papers.py obey the laws. The example compares them with plain torch, on uneven batches."""

from __future__ import annotations

from typing import Any

import pytest

from examples.papers import dgc, ef21, one_bit_adam
from fjoin import transforms as tx
from fjoin.testing import LAWS

PAPERS: dict[str, Any] = {
    "ef21": lambda: ef21("data", tx.top_k(0.2)),
    "dgc": lambda: dgc("data", 0.1, 0.8),
    "one_bit_adam": lambda: one_bit_adam("data", 3, (0.8, 0.95)),
}


@pytest.mark.parametrize("name", PAPERS)
@pytest.mark.parametrize("law", LAWS["transform"], ids=lambda law: law.__name__)
def test_laws(name: str, law: Any) -> None:
    if (name, law.__name__) != ("one_bit_adam", "is_itself_alone"):  # it gives a direction, not a mean
        law(PAPERS[name])
