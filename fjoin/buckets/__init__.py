"""Parameters, slots and gradients in flat memory; which leaf is in which bucket says fjoin.transforms.layout."""

from ._aliases import assign_ as assign_, load_params as load_params
from ._gather import (
    gather_changes_ as gather_changes_,
    gather_leaves as gather_leaves,
    gather_state as gather_state,
    start_gather as start_gather,
)
from ._grad_buffer import (
    BucketQueue as BucketQueue,
    GradBuffer as GradBuffer,
    GradHooks as GradHooks,
    Launch as Launch,
)
from ._module_hooks import REGISTERED as REGISTERED, gradients as gradients
from ._storage import Storage as Storage
