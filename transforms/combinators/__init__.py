"""Transforms made of others, clipping, and looks at the gradients.

Files, simple ones first:
_chain         `chain`, `identity`, `stateless`; the call of the stage behind another one
_conditional   `every`, `switch_after`, `accumulate`
_partition     `partition`, `masked`
_clip          clipping, by norm and by value
_monitor       `tap`, and norms that are recorded
"""

from ._chain import behind as behind, chain as chain, identity as identity, stages as stages, stateless as stateless
from ._clip import clip_by_global_norm as clip_by_global_norm, clip_by_value as clip_by_value
from ._conditional import accumulate as accumulate, every as every, switch_after as switch_after
from ._monitor import NormState as NormState, record_norm as record_norm, tap as tap
from ._partition import (
    Patterns as Patterns,
    check_which as check_which,
    in_fragments as in_fragments,
    label_of as label_of,
    masked as masked,
    partition as partition,
)
