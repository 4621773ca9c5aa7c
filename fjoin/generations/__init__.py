"""Training that continues without the ranks that die, and with those that come.

Files, from the ground up:
_membership    who is in which generation: records in a store that outlives the ranks
_members       a generation: its mesh, its newest state, its loop
_elastic       `elastic`, which calls the training function once in each generation
"""

from ._elastic import elastic as elastic
from ._members import Members as Members
