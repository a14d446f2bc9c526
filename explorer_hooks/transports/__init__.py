"""Weights in by other ways than files."""
