"""The messages of a pipeline, before anything runs."""
