"""Experiences on their way to the trainer: rollouts in immutable Parquet batches inside the job directory.

Free of torch, needs pyarrow (the extra `experience`): `model` is one experience, `table` is the format of
a batch, `batch_paths` are its names, `writer` writes it. docs/experience.md has the format and what is promised.
"""
