"""Optimizers in step_param style, their schedules and their wrappers.

Files, from the ground up:
_schedules   hyperparameters: numbers, and functions of the step
_checks      checks of gradients and states; `unchecked` is the function behind them
_optimizer   `Optimizer`, on one parameter, on lists and on trees
_kernels     steps in place: torch's kernels, which divide and clip by `grad_scale`, or the formula
_sgd         SGD, averaged SGD, Rprop, Lion, Muon
_adam        Adam and its relatives
_adagrad     Adagrad, Adadelta, RMSprop, Adafactor
_wrappers    optimizers around others, and optimizers by torch's names
"""

from ._adagrad import adadelta as adadelta, adafactor as adafactor, adagrad as adagrad, rmsprop as rmsprop
from ._adam import adam as adam, adamax as adamax, adamw as adamw, lamb as lamb, nadam as nadam, radam as radam
from ._checks import check_grad as check_grad, unchecked as unchecked
from ._optimizer import (
    Ages as Ages,
    Matched as Matched,
    Optimizer as Optimizer,
    StepItem as StepItem,
    age_of as age_of,
    apart as apart,
    matched as matched,
    sharing as sharing,
    state_fields as state_fields,
    states_of as states_of,
    step as step,
    step_in_place as step_in_place,
    step_lists_ as step_lists_,
    stepped_together as stepped_together,
    with_state_fields as with_state_fields,
)
from ._schedules import (
    Schedule as Schedule,
    check_rates as check_rates,
    cosine as cosine,
    from_torch_scheduler as from_torch_scheduler,
    linear as linear,
    value_at as value_at,
    warmup as warmup,
    warmup_cosine as warmup_cosine,
)
from ._sgd import asgd as asgd, lion as lion, muon as muon, rprop as rprop, sgd as sgd
from ._wrappers import (
    OF_TORCH as OF_TORCH,
    InjectState as InjectState,
    as_functional_optim as as_functional_optim,
    compared as compared,
    frozen as frozen,
    inject_hyperparameters as inject_hyperparameters,
    leaf_arguments as leaf_arguments,
    master_of as master_of,
    masters_of as masters_of,
    mixed_precision as mixed_precision,
    register_functional_optim as register_functional_optim,
    remade as remade,
    with_hyperparameters as with_hyperparameters,
    with_masters as with_masters,
)
