"""Uneven inputs for any code: `join(loader)`, torch's `Join`, `evaluate`."""

from ._evaluate import evaluate as evaluate
from ._join import Join as Join
from ._joinable import as_joinable as as_joinable
from ._loop import join as join
