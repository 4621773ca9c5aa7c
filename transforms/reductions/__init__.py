"""Means and sums over ranks, whole and encoded; error feedback, PowerSGD, and the mean of ZeRO.

Files, from the ground up:
_coded_sum        messages that are encoded, sent, decoded and summed; where a residual is added to them
_mean             `mean` and `sum_over`, and the division by the total weight
_compress         `compress`, and torch's encoded collectives by axis name
_error_feedback   `error_feedback`: stores the residuals
_hierarchical     `hierarchical_mean`
_scatter_mean     the mean of ZeRO, and the gather of parameters behind it
_factors          matrices as products of two thin ones
_low_rank_mean    the common part of both PowerSGDs
_power_sgd        `power_sgd` and `batched_power_sgd`
_ef21             `ef21`
_dgc              `dgc`
_one_bit_adam     `one_bit_adam`
"""

from ._coded_sum import MeanState as MeanState, cut as cut, init_mean as init_mean
from ._compress import (
    CompressState as CompressState,
    compress as compress,
    quantized as quantized,
)
from ._dgc import DGCState as DGCState, dgc as dgc
from ._ef21 import EF21State as EF21State, ef21 as ef21
from ._error_feedback import ErrorState as ErrorState, error_feedback as error_feedback
from ._hierarchical import hierarchical_mean as hierarchical_mean
from ._low_rank_mean import PowerSGDState as PowerSGDState
from ._mean import mean as mean, sum_over as sum_over
from ._one_bit_adam import OneBitAdamState as OneBitAdamState, one_bit_adam as one_bit_adam
from ._power_sgd import batched_power_sgd as batched_power_sgd, power_sgd as power_sgd
from ._scatter_mean import (
    GatherState as GatherState,
    ShardState as ShardState,
    cut_of as cut_of,
    gather as gather,
    gather_changes as gather_changes,
    scatter_mean as scatter_mean,
)
