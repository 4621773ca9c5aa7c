"""torch's fully_shard with the pipelines of fjoin.transforms.

Files, from the ground up:
_messages   fully_shard's own messages: an idle rank brings zeros, and ranks compare what they gather
_owners     parameters whose optimizer needs them whole
_units      the parts of a module
_run        a pipeline on the slices of a module
_register   `register` and `ShardedHandle`
"""

from ._register import ShardedHandle as ShardedHandle, register as register
