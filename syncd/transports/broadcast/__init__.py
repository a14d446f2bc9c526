"""Weights over a process group of the trainer and the explorers; the step is written to files too."""
