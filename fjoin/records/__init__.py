"""What ranks say to each other: records, step ids, requests, comparisons.

Files, in the order in which a step meets them:
_record         the record that ranks sum in a step: `own_values` of this rank, `StepRecord`, its message `Sums`; `Requests` in it
_step_ids       numbers that tell steps apart, which travel in the record
_device_reads   small tensors that the host reads later
_compare        what must be the same on all ranks; errors that all raise together
_apart          objects as JSON, with their tensors apart
"""

from ._apart import put_together as put_together, references as references, taken_apart as taken_apart
from ._compare import (
    Replicas as Replicas,
    checksum as checksum,
    compare as compare,
    compare_values as compare_values,
    described_tensors as described_tensors,
    form as form,
    on_each as on_each,
    on_first as on_first,
    parameters_fit as parameters_fit,
    wait_until_all_see as wait_until_all_see,
)
from ._device_reads import DeviceReads as DeviceReads, numbers as numbers, read_now as read_now
from ._record import (
    Record as Record,
    Requests as Requests,
    StepRecord as StepRecord,
    Sums as Sums,
    host_number as host_number,
    own_values as own_values,
)
from ._step_ids import Calls as Calls, StepIds as StepIds, step_of as step_of
