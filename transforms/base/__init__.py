"""What every transform is made of: checks, trees, specs, calls, weights, timing, and `Transform` itself."""

from . import (
    checks as checks,
    devices as devices,
    placements as placements,
    record_words as record_words,
    shares as shares,
    specs as specs,
    state_dicts as state_dicts,
    timings as timings,
    trees as trees,
)
from ._call import KEYWORDS as KEYWORDS, Call as Call
from ._transform import (
    ByNorm as ByNorm,
    Compression as Compression,
    Facts as Facts,
    Needs as Needs,
    Reduction as Reduction,
    Transform as Transform,
    TransformInitFn as TransformInitFn,
    TransformUpdateFn as TransformUpdateFn,
    check_transform as check_transform,
    own_state as own_state,
)
from .checks import (
    AxisName as AxisName,
    CollectiveMismatch as CollectiveMismatch,
    Count as Count,
    DesyncError as DesyncError,
    DonatedState as DonatedState,
    FjoinError as FjoinError,
    Index as Index,
    UnboundAxis as UnboundAxis,
)
from .placements import (
    Averaged as Averaged,
    Merge as Merge,
    PerRank as PerRank,
    Placement as Placement,
    Restarted as Restarted,
    Summed as Summed,
)
from .shares import Number as Number, Over as Over, Share as Share, Totals as Totals
from .specs import Spec as Spec, Specified as Specified, factory as factory
from .timings import Period as Period, Timing as Timing
from .trees import State as State, Tree as Tree
