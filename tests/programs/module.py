"""A trainer or an explorer as a process of its own.

module.py trainer JOB STEPS INTERVAL STYLE      publishes by a style, and stops
module.py explorer JOB IDENTITY STEPS INTERVAL STYLE PAUSE
module.py wait JOB ROLE IDENTITY                joins, says so, and waits to be killed
"""

import sys
import time

import numpy as np

from syncd.synchronizer import RunningStatus, Synchronizer, SyncStyle, explorer_needs_sync, trainer_needs_sync

LONG = 60.0


def state(step):
    return {"w": np.full((4, 4), step, np.float32)}


def train(job, steps, interval, style):
    with Synchronizer.open(job, "trainer", timeout=LONG) as sync:
        # All explorers are there from the first step on, so that each run means the same.
        sync.wait_for(lambda: sum(sync.get_explorer_status_counts().values()) == 2)
        last = 0
        for step in range(1, int(steps) + 1):
            time.sleep(0.05)
            last = serve(sync, style, step, last, int(interval))
        # An explorer that has more to do is served until all have stopped.
        while sync.get_explorer_status_counts()[RunningStatus.STOPPED] < 2 and style == "explorer_driven":
            last = serve(sync, style, int(steps), last, int(interval))
            time.sleep(0.01)
    print("trained", last, flush=True)


def serve(sync, style, step, last, interval):
    style = SyncStyle(style)
    if style is SyncStyle.EXPLORER_DRIVEN and step == last:
        sync.notify_no_new_model_state_dict()
    asks = style is SyncStyle.EXPLORER_DRIVEN and sync.explorer_requires_sync()
    if trainer_needs_sync(style, step, last, interval, explorer_asks=asks):
        sync.set_model_state_dict(state(step), step)
        return step
    return last


def explore(job, identity, steps, interval, style, pause):
    with Synchronizer.open(job, "explorer", identity, timeout=LONG) as sync:
        version, loaded = -1, []
        for step in range(1, int(steps) + 1):
            time.sleep(float(pause))
            if style == "fully_async":
                offered = sync.wait_new_model_state_dict(version, no_wait=True)
            elif explorer_needs_sync(step, int(interval)):
                offered = sync.wait_new_model_state_dict(version)
            else:
                continue
            if offered != version:
                version = load(sync)
                loaded.append(version)
        if style == "fully_async":
            while version < int(steps) and sync.trainer_requires_weight_sync() is not None:
                sync.wait_new_model_state_dict(version)
                version = load(sync)
                loaded.append(version)
    print("explored", *loaded, flush=True)


def load(sync):
    tensors, version = sync.get_model_state_dict()
    values = set(np.frombuffer(tensors["w"].data, np.float32))
    assert values == {version}, (values, version)
    sync.confirm(version)
    return version


def wait(job, role, identity):
    sync = Synchronizer.open(job, role, identity)
    print("joined", flush=True)
    sync.wait_for(lambda: False)


if __name__ == "__main__":
    {"trainer": train, "explorer": explore, "wait": wait}[sys.argv[1]](*sys.argv[2:])
