"""A hook, an optimizer and transforms of parameters as one step; its plan, its placements, its explanation.

Files, in the order in which a call meets them:
_pipeline          `Pipeline`; the effect of a step; donated states; rates that ranks compare
_fuse              `fuse`: its init, step and flush; `zero`
_sharded           the pieces that a rank steps, and how parameters are gathered
_skip              `skip_if_nonfinite` and `dynamic_loss_scale`
_plan              how a pipeline runs, and what its ranks sum beside gradients, read off its spec
_placements        which ranks have which part of the state
_explain           `explain`: a step without data, which counts its messages
"""

from ._explain import Counting as Counting, CountingAxis as CountingAxis, Explanation as Explanation, explain as explain
from ._fuse import fuse as fuse, of_slices as of_slices, zero as zero
from ._pipeline import (
    FLUSH as FLUSH,
    Effect as Effect,
    Flag as Flag,
    Pipeline as Pipeline,
    PipelineState as PipelineState,
    Rates as Rates,
    inverse as inverse,
    number_of as number_of,
    parts_of as parts_of,
    rates_of as rates_of,
    totals_of_step as totals_of_step,
    warn_if_silent as warn_if_silent,
)
from ._placements import buffers_placement as buffers_placement, params_placement as params_placement, placed as placed
from ._plan import (
    Parts as Parts,
    Plan as Plan,
    SentRecords as SentRecords,
    StepPlace as StepPlace,
    axes_of as axes_of,
    make_plan as make_plan,
    records_of as records_of,
    takes_flat as takes_flat,
)
from ._sharded import Sharding as Sharding, by_path as by_path
from ._skip import dynamic_loss_scale as dynamic_loss_scale, skip_if_nonfinite as skip_if_nonfinite
