"""TensorBoard event files, written by the `tensorboard` package alone: no torch, no TensorFlow.

Options: `dir`, JOB/monitors/tensorboard unless given. After a resume TensorBoard discards later steps.
"""

import time
from collections.abc import Mapping, Sequence
from functools import cached_property

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata  # type: ignore[import-untyped]
from tensorboard.compat.proto.tensor_pb2 import TensorProto  # type: ignore[import-untyped]
from tensorboard.compat.proto.types_pb2 import DT_STRING  # type: ignore[import-untyped]
from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]

from trainer.monitors.base import MonitoredRun, RolloutSample, check_options, monitor_directory

FLUSH_SECONDS = 10


class TensorBoard:
    def __init__(self, run: MonitoredRun) -> None:
        check_options(run.options, {"dir": str}, "tensorboard")
        self._directory = run.options.get("dir") or monitor_directory(run.directory, "tensorboard")
        self._resumed_from = run.resumed_from

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._add(step, [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()])

    def log_rollouts(self, rollouts: Sequence[RolloutSample], step: int) -> None:
        self._add(step, [_text("rollouts", "\n\n---\n\n".join(map(_markdown, rollouts)))])

    def close(self) -> None:
        if "_opened" in vars(self):
            self._opened.close()

    def _add(self, step: int, values: list[Summary.Value]) -> None:
        self._opened.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    @cached_property
    def _opened(self) -> EventFileWriter:
        writer = EventFileWriter(self._directory, flush_secs=FLUSH_SECONDS)
        start = SessionLog(status=SessionLog.START)
        writer.add_event(Event(wall_time=time.time(), step=self._resumed_from + 1, session_log=start))
        return writer


def _text(tag: str, text: str) -> Summary.Value:
    plugin = SummaryMetadata.PluginData(plugin_name="text")
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
    return Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin), tensor=tensor)


def _markdown(rollout: RolloutSample) -> str:
    head = f"**reward {rollout.reward:g}**, version {rollout.generation}/{rollout.step}, task {rollout.task}"
    return f"{head}\n\n{_quoted(rollout.prompt)}\n\n{_quoted(rollout.response)}"


def _quoted(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])
