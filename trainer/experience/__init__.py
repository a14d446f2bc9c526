"""Experiences as the trainer takes them: reading batches, choosing samples, arrays. Free of torch."""
