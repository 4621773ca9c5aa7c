"""`train_step`: its passes, its state, its loop over uneven inputs; its numbers and its timeline while it trains.

Files, in the order in which a step meets them:
_train_step    `train_step` and `TrainStep`
_join          the loop over uneven inputs, and its last batch for a rank without input
_run           a step on this rank: windows, the passes, and between them what `FlatStep` does
_passes        the forward and backward passes; a rank of weight 0 computes nothing and brings zeros
_loss          calls of the user's functions
_flat_step     `FlatStep`, a `Step` on flat buckets: the optimizer, and the gather of parameters
_state         `TrainState`
_metrics       what a step returns beside it
_step_failures  a step that raised, and what the other ranks learn of it
_signals       a signal as a request
_watch         `show` and `trace`
"""

from ._join import NO_BATCH as NO_BATCH, JoinedLoader as JoinedLoader
from ._loss import weigh as weigh
from ._metrics import Metrics as Metrics
from ._signals import OnSignal as OnSignal
from ._state import TrainState as TrainState, check_state as check_state, load_into as load_into, loaded as loaded
from ._train_step import TrainStep as TrainStep, train_step as train_step
from ._watch import show as show, trace as trace
