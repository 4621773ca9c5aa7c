"""Messages between ranks of one host, in shared memory."""

from ._channel import HostChannel as HostChannel, combine as combine, copy_all as copy_all, flat_view as flat_view
from ._links import LOOK_S as LOOK_S, Exchange as Exchange, HostLinks as HostLinks
from ._packets import Late as Late, PeerGone as PeerGone
from ._rendezvous import Doorway as Doorway, connect as connect, host_name as host_name
