"""Weights that a hook has in memory, handed to an engine's workers over a group of their own."""
