"""One step on buckets: its hook, its stages, what follows from what ranks said.

Files, from the ground up:
_hook_state    the hook's state, as a step stores it
_verdict       whether to step, from the record and the gradients; the total by which the optimizer's kernels divide
_interleave    stages of several buckets in turns, and side streams
_body          the data of a training state, and the ends of a step
_records       the records that ranks sum
_stages        the stages of a hook, on buckets and on the whole tree
_scaling       the factors of a plain mean: who applies which, and when
_reducer       runs the hook: `SumReducer` sums buckets in place, `StagedReducer` runs any stages
_step          `Step`: a whole step, of a train_step and of a registered module
_handle        what the handles of registered modules share
"""

from ._body import EndStates as EndStates, StateData as StateData, StepData as StepData, init_ends as init_ends
from ._handle import (
    ModuleHandle as ModuleHandle,
    after_backward as after_backward,
    free_steps as free_steps,
    guard_steps as guard_steps,
    raise_after_backward as raise_after_backward,
)
from ._hook_state import HookState as HookState, stages_of as stages_of, whole_of as whole_of
from ._records import StepRecords as StepRecords
from ._reducer import Reducer as Reducer, make_reducer as make_reducer
from ._step import STEP as STEP, Step as Step, StepRunner as StepRunner
from ._verdict import Decision as Decision, StepCheck as StepCheck, error_of_step as error_of_step
