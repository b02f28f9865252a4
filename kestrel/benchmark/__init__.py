"""Timing: synthetic models by name, cells of a measurement matrix, their records, the environment."""
