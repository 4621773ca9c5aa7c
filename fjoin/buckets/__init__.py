"""Parameters, slots and gradients in flat memory; which leaf is in which bucket says fjoin.transforms.layout.

Files, in the order in which a step meets them:
_storage        parameters and slots, one flat tensor for each bucket; the leaves that autograd sees
_grad_buffer    `GradHooks` takes a gradient from its leaf, `GradBuffer` holds those of a bucket, `BucketQueue` sends them in order
_aliases        values written into flat memory
_gather         parameters gathered from the pieces that ranks have stepped
_module_hooks   the gradients in a bucket of torch's DistributedDataParallel
"""

from ._aliases import assign_ as assign_, load_params as load_params
from ._gather import (
    gather_changes_ as gather_changes_,
    gather_leaves as gather_leaves,
    gather_state as gather_state,
    start_gather as start_gather,
)
from ._grad_buffer import BucketQueue as BucketQueue, GradBuffer as GradBuffer, GradHooks as GradHooks
from ._module_hooks import REGISTERED as REGISTERED, gradients as gradients
from ._storage import Storage as Storage
