"""Names of events and of the fields that adapters know. docs/events.md says when each event is told."""

from typing import Final

DAEMON_STARTED: Final = "daemon_started"
LEADERSHIP_ACQUIRED: Final = "leadership_acquired"
STANDBY_STARTED: Final = "standby_started"
LEADERSHIP_LOST: Final = "leadership_lost"
DAEMON_STOPPED: Final = "daemon_stopped"

STEP_FOUND: Final = "step_found"
STEP_PROGRESSED: Final = "step_progressed"
STEP_COMPLETED: Final = "step_completed"
STEP_DAMAGED: Final = "step_damaged"
VERSION_PUBLISHED: Final = "version_published"
VERSION_REWOUND: Final = "version_rewound"
STEP_PRUNED: Final = "step_pruned"
STEP_KEPT: Final = "step_kept"
ATTEMPT_PRUNED: Final = "attempt_pruned"
TRASH_EMPTIED: Final = "trash_emptied"
MARKER_REJECTED: Final = "marker_rejected"
VERSION_FILE_REJECTED: Final = "version_file_rejected"
ENTRY_READ_FAILED: Final = "entry_read_failed"
ENTRY_MOVE_FAILED: Final = "entry_move_failed"
DOCUMENT_REJECTED: Final = "document_rejected"

EXPLORER_JOINED: Final = "explorer_joined"
EXPLORER_DIED: Final = "explorer_died"
EXPLORER_LEFT: Final = "explorer_left"
EXPLORER_LAG_CHANGED: Final = "explorer_lag_changed"
TRAINER_JOINED: Final = "trainer_joined"
TRAINER_DIED: Final = "trainer_died"
TRAINER_LEFT: Final = "trainer_left"

REQUEST_COMPLETED: Final = "request_completed"
REQUEST_REFUSED: Final = "request_refused"
SCAN_COMPLETED: Final = "scan_completed"
OPERATION_FAILED: Final = "operation_failed"
WATCH_MODE_SELECTED: Final = "watch_mode_selected"
EMITTER_REBUILT: Final = "emitter_rebuilt"
CONFIG_RELOADED: Final = "config_reloaded"
CONFIG_REJECTED: Final = "config_rejected"
JOB_DISAPPEARED: Final = "job_disappeared"
JOB_RECOVERED: Final = "job_recovered"
MOUNT_STATE_CHANGED: Final = "mount_state_changed"
MOUNT_STUCK: Final = "mount_stuck"

EVENTS = frozenset(
    {
        DAEMON_STARTED, LEADERSHIP_ACQUIRED, STANDBY_STARTED, LEADERSHIP_LOST, DAEMON_STOPPED, STEP_FOUND,
        STEP_PROGRESSED, STEP_COMPLETED, STEP_DAMAGED, VERSION_PUBLISHED, VERSION_REWOUND, STEP_PRUNED,
        STEP_KEPT, ATTEMPT_PRUNED, TRASH_EMPTIED, MARKER_REJECTED, VERSION_FILE_REJECTED, DOCUMENT_REJECTED,
        ENTRY_READ_FAILED, ENTRY_MOVE_FAILED, EXPLORER_JOINED, EXPLORER_DIED, EXPLORER_LEFT,
        EXPLORER_LAG_CHANGED, TRAINER_JOINED, TRAINER_DIED, TRAINER_LEFT, REQUEST_COMPLETED,
        REQUEST_REFUSED, SCAN_COMPLETED, OPERATION_FAILED, WATCH_MODE_SELECTED, EMITTER_REBUILT,
        CONFIG_RELOADED, CONFIG_REJECTED, JOB_DISAPPEARED, JOB_RECOVERED, MOUNT_STATE_CHANGED, MOUNT_STUCK,
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
