"""Means and sums over ranks, whole and encoded; error feedback, PowerSGD, and the mean of ZeRO.

Files, from the ground up:
_coded_sum        sums of encoded messages, and the residuals that are added to them
_mean             `mean` and `sum_over`
_compress         `compress`, and torch's encoded collectives by axis name
_error_feedback   `error_feedback`: stores the residuals
_hierarchical     `hierarchical_mean`
_scatter_mean     the mean of ZeRO, and the gather of parameters behind it
_factors          the mean of matrices as products of two thin ones
_power_sgd        `power_sgd` and `batched_power_sgd`
"""

from ._coded_sum import cut as cut
from ._compress import (
    compress as compress,
    quantized as quantized,
)
from ._error_feedback import ErrorState as ErrorState, error_feedback as error_feedback
from ._hierarchical import hierarchical_mean as hierarchical_mean
from ._mean import (
    mean as mean,
    mean_with_words as mean_with_words,
    sum_over as sum_over,
)
from ._power_sgd import PowerSGDState as PowerSGDState, batched_power_sgd as batched_power_sgd, power_sgd as power_sgd
from ._scatter_mean import (
    GatherState as GatherState,
    ShardState as ShardState,
    cut_of as cut_of,
    gather as gather,
    gather_changes as gather_changes,
    scatter_mean as scatter_mean,
)
