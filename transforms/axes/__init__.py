"""Names of ranks, collectives by name, and the simulator of ranks.

Files, from the ground up:
_environment   `Axis`, an interpreter of collectives; the axes that are bound in a thread
_primitive     one collective on one tensor; how a tree is packed into messages; sums in place
_collectives   `psum` and the others, by the name of an axis
_simulate      ranks simulated in one process
"""

from ._collectives import (
    all_gather as all_gather,
    all_to_all as all_to_all,
    all_to_all_single as all_to_all_single,
    axis_index as axis_index,
    axis_size as axis_size,
    check_splits as check_splits,
    from_one as from_one,
    pbroadcast as pbroadcast,
    place_gathered as place_gathered,
    place_received as place_received,
    pmax as pmax,
    pmean as pmean,
    pmin as pmin,
    ppermute as ppermute,
    psum as psum,
    psum_scatter as psum_scatter,
    split_ranks as split_ranks,
)
from ._environment import (
    Axis as Axis,
    BoundCall as BoundCall,
    Done as Done,
    One as One,
    PieceSum as PieceSum,
    Work as Work,
    bind_axes as bind_axes,
    bound as bound,
    bound_call as bound_call,
    check_late_weight as check_late_weight,
    current_call as current_call,
    current_weight as current_weight,
    lookup as lookup,
)
from ._primitive import (
    DIRECT_BYTES as DIRECT_BYTES,
    Message as Message,
    as_tensor as as_tensor,
    from_order as from_order,
    names as names,
    packed as packed,
    sent_bytes as sent_bytes,
    sum_plain as sum_plain,
    to_order as to_order,
)
from ._simulate import Grid as Grid, simulate as simulate
