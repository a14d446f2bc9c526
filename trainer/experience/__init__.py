"""Experiences as the trainer takes them: reading batches and choosing samples. Free of torch."""
