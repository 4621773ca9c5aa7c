"""Errors of pure code and its interpreters; the errors of the shell are in fjoin."""


class CollectiveMismatch(RuntimeError):
    """Ranks of one axis did not call the same collective on the same shapes in the same order."""


class UnboundAxis(NameError):
    """A collective named an axis that is not bound."""


class NotVmappable(TypeError):
    """A transform that needs the lockstep engine was run under the vmap engine."""


class DonatedState(RuntimeError):
    """A state was used again after a step had taken its memory."""
