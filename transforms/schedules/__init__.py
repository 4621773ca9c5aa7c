"""Schedules: hyperparameters as functions of the step."""
