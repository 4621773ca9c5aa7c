"""torch's fronts: optimizers, averagers, ZeroRedundancyOptimizer."""

from ._averagers import (
    HierarchicalModelAverager as HierarchicalModelAverager,
    PeriodicModelAverager as PeriodicModelAverager,
)
from ._optimizer import Optimizer as Optimizer
from ._param_groups import ForeachStepper as ForeachStepper, divides as divides
from ._post_local_sgd_optimizer import PostLocalSGDOptimizer as PostLocalSGDOptimizer
from ._zero_redundancy_optimizer import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer
from ._zero_shard import WholeLeaves as WholeLeaves
from ._zero_state import WholeState as WholeState, slice_state as slice_state
