"""Weights that a hook has in memory, handed to an engine's workers: as shared memory, or over a group."""
