"""Losses of jax in steps of torch, and optax's transformations as stages; `import fjoin.jax` needs jax.

losses     loss
optax      from_optax  to_optax
trees      to_torch  to_jax
buffers    flat  nested
"""

from ._loss import loss as loss
from ._optax import from_optax as from_optax, to_optax as to_optax
from ._trees import flat as flat, nested as nested, to_jax as to_jax, to_torch as to_torch
