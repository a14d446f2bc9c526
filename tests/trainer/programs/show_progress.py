"""Show a made-up run: KIND (live, plain, auto), and how many steps; it logs beside it as a trainer does."""

import logging
import sys
import time

import structlog

from syncd.jobfile.model import JobFile
from syncd.observe import log
from trainer.reporting.display import Progress

kind, steps = sys.argv[1], int(sys.argv[2])
log.configure("info", sys.stderr)
logging.basicConfig(stream=sys.stderr)
progress = Progress.open(
    JobFile.model_validate({"job": {"dir": "/job"}, "model": {"path": "/m"}, "monitor": {"progress": kind}}),
    1000,
    100,
)
for step in range(101, 101 + steps):
    time.sleep(0.1)
    progress.update(
        {
            "critic/score/mean": 0.512 + step / 1e4,
            "critic/score/std": 0.21,
            "critic/score/max": 1.0,
            "critic/score/min": 0.0,
            "actor/pg_loss": -0.0123,
            "actor/kl_loss": 0.00042,
            "actor/entropy": 1.234,
            "actor/grad_norm": 0.91,
            "response_length/mean": 812.4,
            "perf/tokens_per_second": 29324.5,
            "timing_s/step": 4.21,
            "timing_s/train_step": 3.1,
            "timing_s/sample_wait": 0.93,
            "timing_s/sync_weight": 0.118,
            "timing_s/save_checkpoint": 12.3,
            "sync/step": step // 2 * 2.0,
            "sync/failures": 1.0,
            "save/step": 100.0,
            "experience/waiting": 512.0,
            "experience/age_mean": 1.25,
            "experience/age_max": 4.0,
            "experience/dropped": 16.0,
        },
        step,
    )
    if step % 10 == 0:
        structlog.get_logger().info("a log line", step=step)
        logging.getLogger("library").warning("a library's line %s", step)
        print(f"something printed {step}", file=sys.stderr)
progress.note("resting")
progress.close()
structlog.get_logger().info("after the display")
