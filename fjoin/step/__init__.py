"""One step on buckets: its hook, its stages, what follows from what ranks said."""

from ._agreements import Agreements as Agreements
from ._body import EndStates as EndStates, StateData as StateData, init_ends as init_ends, run_end as run_end
from ._hook import StepHook as StepHook, make_hook as make_hook, power_near as power_near
from ._hook_state import HookState as HookState
from ._run import STEP as STEP, named as named, spanned as spanned, step_buckets as step_buckets
from ._stages import BucketStages as BucketStages
from ._verdict import CountsOfAll as CountsOfAll, Decision as Decision, StepCheck as StepCheck
