"""Errors that pure code and its interpreters raise; the shell's own stand in fjoin."""


class CollectiveMismatch(RuntimeError):
    """Ranks of one axis did not call the same collective on the same shapes in the same order."""


class UnboundAxis(NameError):
    """A collective named an axis that nothing binds where it runs."""


class NotVmappable(TypeError):
    """A transform that needs the lockstep engine was run under the vmap engine."""
