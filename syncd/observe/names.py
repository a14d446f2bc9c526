"""Names of events and of the fields that adapters know. docs/events.md says when each event is told."""

from typing import Final

DAEMON_STARTED: Final = "daemon_started"
LEADING: Final = "leading"
STANDING_BY: Final = "standing_by"
FENCED: Final = "fenced"
DAEMON_STOPPED: Final = "daemon_stopped"

STEP_FOUND: Final = "step_found"
STEP_PROGRESS: Final = "step_progress"
STEP_COMPLETE: Final = "step_complete"
STEP_DAMAGED: Final = "step_damaged"
VERSION_PUBLISHED: Final = "version_published"
REWIND: Final = "rewind"
STEP_REMOVED: Final = "step_removed"
STEP_KEPT: Final = "step_kept"
ATTEMPT_REMOVED: Final = "attempt_removed"
TRASH_EMPTIED: Final = "trash_emptied"
MARKER_PROBLEM: Final = "marker_problem"
VERSION_PROBLEM: Final = "version_problem"
ENTRY_UNREADABLE: Final = "entry_unreadable"
ENTRY_OBSTRUCTED: Final = "entry_obstructed"
DOCUMENT_PROBLEM: Final = "document_problem"

EXPLORER_JOINED: Final = "explorer_joined"
EXPLORER_DEAD: Final = "explorer_dead"
EXPLORER_LEFT: Final = "explorer_left"
EXPLORER_LAG: Final = "explorer_lag"
TRAINER_JOINED: Final = "trainer_joined"
TRAINER_DEAD: Final = "trainer_dead"
TRAINER_LEFT: Final = "trainer_left"

REQUEST_DONE: Final = "request_done"
REQUEST_REFUSED: Final = "request_refused"
SCAN_DONE: Final = "scan_done"
ERROR: Final = "error"
WATCH_MODE: Final = "watch_mode"
EMITTER_REBUILT: Final = "emitter_rebuilt"
CONFIG_RELOADED: Final = "config_reloaded"
CONFIG_REJECTED: Final = "config_rejected"
JOB_MISSING: Final = "job_missing"
JOB_BACK: Final = "job_back"
MOUNT_STATE: Final = "mount_state"
MOUNT_STUCK: Final = "mount_stuck"

EVENTS = frozenset(
    {
        DAEMON_STARTED, LEADING, STANDING_BY, FENCED, DAEMON_STOPPED, STEP_FOUND, STEP_PROGRESS,
        STEP_COMPLETE, STEP_DAMAGED, VERSION_PUBLISHED, REWIND, STEP_REMOVED, STEP_KEPT,
        ATTEMPT_REMOVED, TRASH_EMPTIED, MARKER_PROBLEM, VERSION_PROBLEM, DOCUMENT_PROBLEM, ENTRY_UNREADABLE,
        ENTRY_OBSTRUCTED, EXPLORER_JOINED, EXPLORER_DEAD, EXPLORER_LEFT, EXPLORER_LAG,
        TRAINER_JOINED, TRAINER_DEAD, TRAINER_LEFT, REQUEST_DONE, REQUEST_REFUSED, SCAN_DONE, ERROR,
        WATCH_MODE, EMITTER_REBUILT, CONFIG_RELOADED, CONFIG_REJECTED, JOB_MISSING, JOB_BACK,
        MOUNT_STATE, MOUNT_STUCK,
    }
)  # fmt: skip
"""Every event there is."""

# Fields. Their values have the same meaning and unit in every event.
BYTES: Final = "bytes"
CODE: Final = "code"
DETAIL: Final = "detail"
EXPECTED: Final = "expected"
EXPLORER: Final = "explorer"
EXPLORERS: Final = "explorers"
FREE: Final = "free"
FULL: Final = "full"
GENERATION: Final = "generation"
JOB: Final = "job"
LAG: Final = "lag"
LATENCY: Final = "latency"
LEASES: Final = "leases"
PRESENT: Final = "present"
REASON: Final = "reason"
RULE: Final = "rule"
SECONDS: Final = "seconds"
STATE: Final = "state"
STEP: Final = "step"
STEPS: Final = "steps"
TERM: Final = "term"
TRAINERS: Final = "trainers"
