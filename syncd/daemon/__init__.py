"""The daemon: wake -> scan -> plan -> act.

`scan` reads a frozen `Snapshot`; `plan` is a pure function of it; `act` is the only code that publishes or deletes.
"""
