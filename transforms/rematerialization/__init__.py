"""Activations that are computed again: `remat`, its policies, its offload, what a function saves."""

from ._keeper import checkpoint_name as checkpoint_name
from ._offload import Offload as Offload
from ._policies import (
    Keep as Keep,
    Policy as Policy,
    dots_saveable as dots_saveable,
    dots_with_no_batch_dims_saveable as dots_with_no_batch_dims_saveable,
    everything_saveable as everything_saveable,
    nothing_saveable as nothing_saveable,
    offload_dot_with_no_batch_dims as offload_dot_with_no_batch_dims,
    save_and_offload_only_these_names as save_and_offload_only_these_names,
    save_any_names_but_these as save_any_names_but_these,
    save_from_both_policies as save_from_both_policies,
    save_only_these_names as save_only_these_names,
)
from ._reach import SIMPLE as SIMPLE, filled as filled, slots_of as slots_of
from ._remat import Runner as Runner, remat as remat, runner_of as runner_of
from ._residuals import Residual as Residual, Residuals as Residuals, saved_residuals as saved_residuals
