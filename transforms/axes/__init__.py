"""Named axes: collectives, and the interpreters that run them without processes."""
