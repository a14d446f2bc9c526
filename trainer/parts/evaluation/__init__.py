"""Evaluation on the trainer's side: what explorers measured becomes figures of the run."""
