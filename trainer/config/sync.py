"""Checks `[sync]` against the rest of the file: `delta = "on"` where no step could be a delta. Needs no torch."""

from collections.abc import Iterator

from syncd.jobfile.model import JobFile
from syncd.jobfile.problems import Problem

KEY = "sync.delta"


def sync_problems(config: JobFile) -> Iterator[Problem]:
    if config.sync.delta != "on":
        return
    if config.sync.mode == "stream":
        text = 'sync.delta = "on" has no effect with sync.mode = "stream", which keeps no weights to compare with'
        yield Problem(KEY, text, 'sync.mode = "background", or sync.delta = "auto"')
    if config.model.publishes_adapters:
        text = 'sync.delta = "on" has no effect with steps that are adapters'
        yield Problem(KEY, text, 'model.lora.publish = "merged", or sync.delta = "auto"')
