"""Jobs and worlds that several files of tests begin from."""

from support.job_fixtures import busy, explorer, one_step, trainer, world

__all__ = ["busy", "explorer", "one_step", "trainer", "world"]
