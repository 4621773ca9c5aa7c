"""Losses of jax in steps of torch; `import fjoin.jax` needs jax.

loss                a function of jax as the loss_fn of a train_step, of value_and_grad, or of a loop of your own
to_torch  to_jax    trees of arrays as trees of tensors, and back
flat  nested        buffers by path, as a train_step keeps them, and nested dicts, as flax has them
"""

from ._loss import loss as loss
from ._trees import flat as flat
from ._trees import nested as nested
from ._trees import to_jax as to_jax
from ._trees import to_torch as to_torch
