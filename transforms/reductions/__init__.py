"""Means and sums over ranks, whole and encoded; error feedback, PowerSGD, and the mean of ZeRO.

Files, from the ground up:
_mean             `mean`, `sum_over`, `hierarchical_mean`; sums of encoded messages, and the residuals that are added to them
_compress         `compress`, `error_feedback`, and torch's encoded collectives by axis name
_scatter_mean     the mean of ZeRO, and the gather of parameters behind it
_factors          the mean of matrices as products of two thin ones
_power_sgd        `power_sgd` and `batched_power_sgd`
"""

from ._compress import compress as compress, error_feedback as error_feedback, quantized as quantized
from ._mean import (
    cut as cut,
    hierarchical_mean as hierarchical_mean,
    mean as mean,
    mean_with_words as mean_with_words,
    sum_over as sum_over,
)
from ._power_sgd import batched_power_sgd as batched_power_sgd, power_sgd as power_sgd
from ._scatter_mean import (
    GatherState as GatherState,
    ShardState as ShardState,
    cut_of as cut_of,
    gather as gather,
    gather_changes as gather_changes,
    mean_of_sums as mean_of_sums,
    scatter_mean as scatter_mean,
)
