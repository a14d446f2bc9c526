"""The daemon: wake -> scan -> plan -> publish, remove.

`scan` reads a frozen `Snapshot`; `plan` is a pure function of it; `leader` publishes, `removals` and `trash` delete.
"""
