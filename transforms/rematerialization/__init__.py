"""Activations that are computed again: `remat`, its policies, its offload, what a function saves."""

from . import checkpoint_policies as checkpoint_policies
from ._keeper import (
    checkpoint_name as checkpoint_name,
    memory_of as memory_of,
    run_op as run_op,
    tensors_in as tensors_in,
)
from ._remat import Runner as Runner, remat as remat, runner_of as runner_of
from ._residuals import Residuals as Residuals, saved_residuals as saved_residuals
from .checkpoint_policies import Policy as Policy
