"""Uneven inputs for any code: `join(loader)`, torch's `Join`, `evaluate`."""

from ._evaluate import Evaluation as Evaluation, evaluate as evaluate
from ._join import Join as Join
from ._joinable import (
    Joinable as Joinable,
    JoinHook as JoinHook,
    PureJoinable as PureJoinable,
    as_joinable as as_joinable,
)
from ._loop import Loop as Loop, join as join
