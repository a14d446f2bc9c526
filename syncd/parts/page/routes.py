"""The routes of a page beside `/data.json`: charts, and rollouts if they are shown; each with a thread of its own."""

from collections.abc import Callable

from syncd.parts.page import charts, rollouts
from syncd.parts.page.charts import ChartReader
from syncd.parts.page.poller import SharedPoll
from syncd.parts.page.rollout import RolloutReader
from syncd.parts.page.rollouts import RolloutIndex
from syncd.parts.page.site import Route
from syncd.protocol.disk import Clock
from syncd.protocol.layout import Job

PATIENCE = 2.0  # seconds that a request waits for a reading that is due


def file_routes(
    open_job: Callable[[], Job], clock: Clock, every: float, *, with_rollouts: bool
) -> dict[str, Route]:
    """Return the routes by path; two readings are at least `every` seconds apart: these routes take longer."""
    return {
        **_charts(open_job, clock, max(every, charts.EVERY)),
        **(_rollouts(open_job, clock, max(every, rollouts.EVERY)) if with_rollouts else _NO_ROLLOUTS),
    }


_NO_ROLLOUTS: dict[str, Route] = {"/rollouts.json": lambda _: rollouts.disabled()}


def _charts(open_job: Callable[[], Job], clock: Clock, every: float) -> dict[str, Route]:
    poll = SharedPoll(ChartReader(open_job), clock, every)
    return {
        "/charts.json": lambda _: charts.answer(poll.current(PATIENCE), every),
        "/lanes.json": lambda _: charts.lanes_answer(poll.current(PATIENCE), every),
    }


def _rollouts(open_job: Callable[[], Job], clock: Clock, every: float) -> dict[str, Route]:
    poll, reader = SharedPoll(RolloutIndex(open_job), clock, every), RolloutReader(open_job)
    return {
        "/rollouts.json": lambda query: rollouts.answer(poll.current(PATIENCE), every, query),
        "/rollout.json": lambda query: reader.answer(query, PATIENCE),
    }
