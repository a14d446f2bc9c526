"""What tests of the page begin from: jobs, and a browser."""

from support.job_fixtures import browser, busy, one_step

__all__ = ["browser", "busy", "one_step"]
