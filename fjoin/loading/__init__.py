"""Loaders: exact positions, shuffled samples, guards."""

from ._guards import LookAhead as LookAhead
from ._position import (
    END as END,
    JoinedLoop as JoinedLoop,
    Terminated as Terminated,
    check_position as check_position,
)
from ._shuffled import Shuffled as Shuffled
