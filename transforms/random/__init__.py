"""Random numbers as functions of keys, with jax's names and bits: the same on every device, under vmap, in remat and on any rank.

keys    key  split  fold_in
draws   bits  uniform  normal  bernoulli  randint  permutation  categorical

A key is a value: who draws from it twice gets the same numbers twice. Fold in what tells draws apart, such as the number of
the step and the rank:

>>> from fjoin import transforms as tx
>>> dropout = tx.random.fold_in(tx.random.key(0), 7)
>>> tx.random.bernoulli(dropout, 0.9, (3,)).shape
torch.Size([3])
"""

from ._draws import bernoulli as bernoulli
from ._draws import bits as bits
from ._draws import categorical as categorical
from ._draws import normal as normal
from ._draws import permutation as permutation
from ._draws import randint as randint
from ._draws import uniform as uniform
from ._keys import fold_in as fold_in
from ._keys import key as key
from ._keys import split as split
