"""Reporting what happens: one event type, and adapters of it: log, journal, metrics."""
