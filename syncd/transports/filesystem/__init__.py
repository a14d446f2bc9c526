"""Weights through files: save (the trainer), load and stage (the explorer)."""
