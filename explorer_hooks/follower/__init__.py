"""Keeps one engine at the version that a policy names: read, decide, fetch, load, report."""
