"""Evaluation: held-out tasks at versions and steps, and a teacher that reads responses."""
