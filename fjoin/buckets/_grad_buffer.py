"""Gradients in flat buffers, and the order in which their messages leave."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor

from ..transforms.axes import Work
from ..transforms.base import devices, trees
from ..transforms.layout import Bucket, Pieces, views
from ._storage import Storage

# Elements from which on a gradient on the host is copied as soon as it has come: later it would be in the cache no
# more.
_CACHED = 2**17


class GradBuffer:
    """The gradients of one bucket in one step.

    Attributes:
        buffer: The gradients, followed by the words of the record if this bucket carries them: the message of a plain
            reduction.
        grads: The gradients' part of the buffer, or a hook's result.
        words: The record's part of the buffer, maybe empty.
        pieces: The pieces of this bucket; None if it is not sharded.
        scattered: Whether `grads` is this rank's piece of the bucket.
        last: The leaf whose gradient comes last, as a step has shown; None if none has.
        message_sum: The sum of all elements after the message, if the transport computed it; otherwise None.
        direct: Whether autograd's gradient itself becomes the message.
        on_device: Whether it is on a device, where a launch costs more than memory.

    Args:
        bucket: The bucket.
        shapes: Path -> the parameter's shape.
        n_words: The elements of the record in this buffer.
        pieces: See above.
        memory: A flat buffer of zeros for the gradients and the record, of which messages need no copy.
    """

    def __init__(
        self,
        bucket: Bucket,
        shapes: Mapping[str, torch.Size],
        n_words: int,
        pieces: Pieces | None = None,
        memory: Tensor | None = None,
    ) -> None:
        self.layout, self._shapes, self.pieces, self.scattered = bucket, shapes, pieces, False
        self.direct: bool = bucket.direct and memory is None
        numel = 0 if self.direct else bucket.numel
        if memory is None:
            memory = torch.zeros(numel + n_words, dtype=bucket.dtype, device=bucket.device)
        self.buffer: Tensor = memory
        self._own = self.grads = self.buffer[:numel]
        self.words: Tensor = self.buffer[numel:]
        self._padding: Tensor | None = None  # the elements between leaves
        used = torch.zeros(numel, dtype=torch.bool)
        for path, at in zip(bucket.paths, bucket.offsets, strict=True):
            used[at : at + shapes[path].numel()] = True
        if not used.all():
            self._padding = (~used).nonzero().view(-1).to(bucket.device)
        self._views = [] if self.direct else views(bucket, self.grads, shapes)
        self.on_device: bool = not devices.is_host(bucket.device)
        self.leaves: list[Tensor] = []
        self.work: Work | None = None
        # The norm or the sum of `grads`; see GradCheck.observe.
        self.seen: Tensor = torch.zeros((), device=bucket.device)
        self.message_sum: float | None = None
        self.missing = 0
        self.last: int | None = None
        self._come: list[int] = []  # the leaves whose gradients have come, and are not taken yet
        self._small = self.on_device or all(shape.numel() < _CACHED for shape in map(shapes.__getitem__, bucket.paths))
        self.used: list[bool] = [False] * len(bucket.paths)  # whether a gradient of each leaf has ever come

    def start(self, leaves: list[Tensor], window: dict[Tensor, Tensor]) -> None:
        """Prepare for the gradients of these leaves.

        Args:
            window: The sums of earlier gradients, to be added; see `Storage`.
        """
        self._window = window
        self.leaves, self.missing, self.work, self.message_sum = leaves, len(leaves), None, None
        self.scattered = False
        # A hook may have replaced it by its result. On the host a direct buffer keeps the last gradient until the next
        # one comes: free memory at the end of the heap would go back to the system, and be faulted in again.
        self.grads = self._own
        self.taken = [False] * len(leaves)
        self._come = []

    def arrived(self, i: int) -> None:
        """Note that autograd has left the gradient of the i-th leaf there.

        On the host it is taken while it is in the cache.
        """
        if self.taken[i]:
            self.refuse_second(i)
        self.taken[i] = True
        self._come.append(i)
        if not self.on_device or len(self._come) == self.missing:  # a launch on a device costs more than memory
            self.take(self._come)
        if not self.missing and self._small:
            self.last = i

    def take(self, places: Sequence[int]) -> None:
        """Take the gradients of these leaves, in one launch."""
        grads: list[Any] = []
        for i in places:
            leaf = self.leaves[i]
            grad: Any = leaf.grad
            if grad.layout is not torch.strided:
                trees.check_dense(f"the gradient of {self.layout.paths[i]!r}", grad)
            if self._window and (total := self._window.pop(leaf, None)) is not None:
                grad = total.add_(grad).to(grad.dtype)
            grads.append(grad)
            leaf.grad = None
            self.taken[i] = self.used[i] = True
        if self.direct:
            # Autograd's gradient itself becomes the message, without a copy, unless other gradients share its memory.
            for grad in grads:
                self.buffer = self.grads = (grad.clone() if _is_shared(grad) else grad.contiguous()).view(-1)
        elif grads:
            torch._foreach_copy_([self._views[i] for i in places], grads)
        self.missing -= len(places)
        self._come = []

    def fill(self) -> None:
        """Complete the bucket after backward with gradients of earlier calls, or zeros where there are none."""
        for i, leaf in enumerate(self.leaves):
            if leaf.grad is None and leaf in self._window:
                leaf.grad = torch.zeros_like(leaf)
            elif leaf.grad is None and not self.taken[i]:
                if self.direct:
                    self.buffer = self.grads = torch.zeros_like(leaf).view(-1)
                else:
                    self._views[i].zero_()
        self.take([i for i, leaf in enumerate(self.leaves) if leaf.grad is not None])
        self.missing = 0

    def refuse_second(self, i: int) -> NoReturn:
        """Raise RuntimeError for a gradient of the i-th leaf that comes after one of the same backward pass."""
        raise RuntimeError(
            f"the gradient of {self.layout.paths[i]!r} arrived twice in one backward pass, so that one part would be lost; with "
            f"torch.utils.checkpoint pass use_reentrant=False"
        )

    def clear_padding(self) -> None:
        if self._padding is not None:
            self.grads.index_fill_(0, self._padding, 0)

    def wait(self) -> None:
        """Wait for the bucket's messages; on CUDA only the stream waits."""
        if self.work is not None:
            self.work.wait()
            self.message_sum = getattr(self.work, "total", None)
            self.work = None

    def scatter(self, piece: Tensor) -> None:
        """Take this rank's piece of the reduced gradients."""
        self.grads, self.scattered = piece, True

    def in_pieces(self) -> tuple[Tensor, Sequence[int]]:
        """The gradients, those of each rank's piece together, and where each piece begins, with the end of the last
        one.
        """
        assert self.pieces is not None
        return self.buffer, self.pieces.bounds[0]

    def pack_own(self, slices: Mapping[str, Tensor]) -> Tensor:
        """This rank's piece, from its slices."""
        assert self.pieces is not None
        return self.pieces.pack_own(0, slices)

    def free(self) -> None:
        """Free memory that holds these gradients besides the buffer: autograd's own, or a hook's result."""
        self.grads = self._own
        self.buffer = self._own if self.direct else self.buffer

    def by_path(self) -> dict[str, Tensor]:
        """Path -> view of its gradient, or of this rank's slice of it."""
        if self.scattered:
            assert self.pieces is not None
            return self.pieces.leaves_own(0, self.grads)
        found = self._views if self.grads is self._own else views(self.layout, self.grads, self._shapes)
        return dict(zip(self.layout.paths, found, strict=True))


def keep_grad(leaf: Tensor, storage: Storage | None) -> None:
    """Keep a leaf's gradient for the rest of an accumulation window, to which later ones are added in place.

    At the leaf it gets memory of its own, if other leaves' gradients share it. Gradients of 16 bits are added in
    float32.
    """
    grad = leaf.grad
    if grad is None or grad.layout is not torch.strided:
        return
    if storage is not None and grad.dtype.itemsize < 4:
        total = storage.window.get(leaf)
        storage.window[leaf] = devices.widened(grad) if total is None else total.add_(grad)
        leaf.grad = None
    elif _is_shared(grad):
        leaf.grad = grad.clone()


def _is_shared(grad: Tensor) -> bool:
    """Whether another tensor shares the memory, as the gradients of a and b in (a.view(-1) + b.view(-1)) do."""
    storage = grad.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > _ALONE


# The use count of unshared memory: one for the tensor, one for the Python object through which it is read.
_ALONE = 2


# Starts the hook of one bucket, given its number and its gradients.
LaunchBucket: TypeAlias = Callable[[int, GradBuffer], "Work | None"]


class BucketQueue:
    """Launches the buckets' messages in the buckets' order, whatever order they fill in.

    Args:
        buckets: The buckets.
    """

    def __init__(self, buckets: list[GradBuffer]) -> None:
        self.buckets = buckets
        self._next = len(buckets)
        self._open = False

    def start(self, storage: Storage, launch: LaunchBucket) -> None:
        """Take the gradients of these parameters, and launch the buckets in the thread that fills them."""
        self._next, self._open, self._launch = 0, True, launch
        for bucket, leaves in zip(self.buckets, storage.by_bucket, strict=True):
            bucket.start(leaves, storage.window)

    @contextlib.contextmanager
    def muted(self, storage: Storage) -> Iterator[None]:
        """Discard gradients that arrive within the with block. A factor of 0 would not do: 0 * inf is nan."""
        self._open = False
        with storage.grads_aside():
            yield

    def stop(self) -> None:
        """Take no more gradients until the next start."""
        self._open = False
        for bucket in self.buckets:
            bucket.work = None

    def free(self) -> None:
        """Free gradients of a device after the step. The host keeps freed memory for the next one."""
        for bucket in self.buckets:
            if bucket.on_device:
                bucket.free()

    def arrived(self, index: int, i: int | None) -> None:
        """Note a gradient of this bucket, and launch the buckets that are ready.

        Args:
            i: Its number; None: the one that comes last.
        """
        if not self._open:
            return  # a backward pass over these leaves outside the step
        bucket = self.buckets[index]
        if i is not None and bucket.leaves[i].grad is not None:  # a function's backward may give none
            bucket.arrived(i)
        elif i is None and all([leaf.grad is not None for leaf in bucket.leaves]):  # others are taken after backward
            bucket.take(range(bucket.missing))
        if not bucket.missing:
            self._advance()

    def _advance(self) -> None:
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            bucket = self.buckets[self._next]
            bucket.work = self._launch(self._next, bucket)
            self._next += 1

    def finish(self) -> None:
        """Fill and launch the buckets that backward did not complete, after it has ended."""
        self._open = False
        for bucket in self.buckets:
            late = [i for i, leaf in enumerate(bucket.leaves) if leaf.grad is not None]
            if bucket.missing:
                bucket.fill()
                bucket.last = None if late else bucket.last  # they come in another order now
            elif late:
                bucket.refuse_second(late[0])
        self._advance()


class GradHooks:
    """The autograd hooks on the leaves of one state.

    The hooks hold this object by a weak reference, and it holds the state by one: hooks that held a step would
    keep all its memory forever.

    Attributes:
        queue: The queue that takes the gradients; None if none does.
        in_loss: Whether `loss_fn` runs, in which no gradient may come.
    """

    def __init__(self) -> None:
        self.queue: BucketQueue | None = None
        self.in_loss: bool = False
        self._keeping = False
        self._handles: list[Any] = []
        self._lasts: list[int | None] = []
        self._attached: Callable[[], Storage | None] = lambda: None

    def attach(self, storage: Storage, one_pass: bool) -> None:
        """Attach hooks to the leaves of this storage, and remove those from the previous one.

        A step of one backward pass has one hook for each bucket, on the leaf that comes last, once the first step has
        shown which.

        Args:
            one_pass: Whether a step has one backward pass.
        """
        buckets = [] if self.queue is None or not one_pass else self.queue.buckets
        lasts = [bucket.last for bucket in buckets] or [None] * len(storage.layout)
        if self._attached() is storage and lasts == self._lasts:
            return
        self.detach()
        self._attached, self._lasts = weakref.ref(storage), lasts
        me = weakref.ref(self)

        def hook_of(bucket: int, leaf: int | None) -> Callable[[Tensor], None]:
            def arrived(tensor: Tensor) -> None:  # it runs for every leaf in every step
                hooks = me()
                if hooks is None:
                    return
                if hooks.in_loss:
                    raise RuntimeError(
                        "loss_fn has called backward, which has reached a parameter: return the loss, whose backward pass the step runs; "
                        "for a gradient that loss_fn itself needs call torch.autograd.grad"
                    )
                if hooks._keeping:
                    keep_grad(tensor, hooks._attached())
                elif hooks.queue is not None:
                    hooks.queue.arrived(bucket, leaf)

            return arrived

        for i, (leaves, last) in enumerate(zip(storage.by_bucket, lasts, strict=True)):
            some = enumerate(leaves) if last is None else [(None, leaves[last])]
            self._handles += [leaf.register_post_accumulate_grad_hook(hook_of(i, j)) for j, leaf in some]

    def detach(self) -> None:
        self._attached = lambda: None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Leave gradients at the leaves within the with block: for an accumulation window."""
        self._keeping = True
        try:
            yield
        finally:
            self._keeping = False
