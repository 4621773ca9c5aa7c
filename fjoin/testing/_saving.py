"""States saved to a file and loaded again."""

from __future__ import annotations

import io
from typing import Any

import torch

from .. import transforms as tx


def saved_and_loaded(state: Any, like: Any) -> Any:
    """The state after saving to a file and loading it, which unpickles only tensors and numbers."""
    file = io.BytesIO()
    torch.save(tx.to_state_dict(state), file)
    file.seek(0)
    return tx.from_state_dict(like, torch.load(file, weights_only=True))
