"""Uneven inputs for any code: `join(loader)`, torch's `Join`, `evaluate`.

step.join(loader)         the loop of a `train_step`, which takes part for a rank that is out of input
join(loader)              a loop of your own, whose body runs there too, with weight 0
Join([ddp, optimizer])    a loop around torch's classes, whose body does not run there
"""

from ._evaluate import evaluate as evaluate
from ._join import Join as Join
from ._joinable import as_joinable as as_joinable
from ._loop import join as join
