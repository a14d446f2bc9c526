"""Telling what happens: one event type, and adapters of it."""
