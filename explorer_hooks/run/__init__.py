"""The ready explorer: tasks in, experiences out."""
