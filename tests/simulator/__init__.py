"""Deterministic simulation: production code on a virtual file server, with faults, and an observer of all.

Everything the protocol does goes through `Disk` and `Clock`, so here both are virtual: hosts with name caches
of their own, lost answers, crashes at any call, power cuts. One seed is one schedule, and replays exactly.

    python -m simulator --schedules 1000 --seed 1
"""
