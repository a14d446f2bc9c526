"""Which charts the page has: the panels of the trainer's figures, and those of the daemon's journal."""

from syncd.figures import PANELS, Curve, Panel

EVENTS = "events.jsonl"  # the daemon's journal: docs/events.md

CHARTS = (
    *PANELS,
    Panel(
        "latency",
        "From marker to version",
        "seconds",
        (Curve("latency", ("latency",)),),
        from_zero=True,
        source=EVENTS,
        missing="Not recorded by the daemon yet",
    ),
    Panel(
        "saved",
        "Saved by deltas, in all",
        "bytes",
        (Curve("saved", ("saved",), "step"),),
        from_zero=True,
        source=EVENTS,
        missing="No version has changes of a parent yet",
    ),
    Panel(
        "engines",
        "Explorers and engines in trouble",
        "explorers",
        (Curve("explorers", ("explorers",), "step"), Curve("in trouble", ("trouble",), "step")),
        from_zero=True,
        source=EVENTS,
        missing="No explorer was seen yet",
    ),
)
"""The charts in the order of the page."""
