"""Names of the daemon's events: below each, when it is published, and in brackets its levels and fields.

docs/events.md is generated from this.
"""

from typing import Final

DAEMON_STARTED: Final = "daemon_started"
"""`syncd watch` begins. [info: job, state, version]"""
LEADERSHIP_ACQUIRED: Final = "leadership_acquired"
"""This daemon leads the job now. [info: term]"""
STANDBY_STARTED: Final = "standby_started"
"""Another daemon leads; this one stands by. [info: detail]"""
LEADERSHIP_LOST: Final = "leadership_lost"
"""A newer leader took over, or an operator removed this term; then the daemon becomes a candidate again.
[warning: detail]"""
DAEMON_STOPPED: Final = "daemon_stopped"
"""The daemon ends. [info]"""

STEP_FOUND: Final = "step_found"
"""A step directory appeared. [info, debug: step, state, present, expected, bytes, layout, problem]"""
STEP_PROGRESSED: Final = "step_progressed"
"""One more shard or receipt arrived. [info: step, state, present, expected, bytes, layout, problem]"""
STEP_COMPLETED: Final = "step_completed"
"""Nothing of the step is missing. [info: step, state, present, expected, bytes, layout, problem]"""
STEP_DAMAGED: Final = "step_damaged"
"""A step is damaged; the daemon does not publish it. [error, warning: step, state, present, expected, bytes,
layout, problem, detail]"""
STEP_QUARANTINED: Final = "step_quarantined"
"""The daemon quarantined a step; once for each step. [error: step, digest, reason]"""
SHORTCUT_REJECTED: Final = "shortcut_rejected"
"""No reader can use the shortcut of a step that is stored whole; the step itself is complete. Once for
each step. [warning: step, parent, detail]"""
VERSION_PUBLISHED: Final = "version_published"
"""Explorers follow this version from now on; the last five fields only with a delta or a shortcut. [info:
generation, step, kind, reason, bytes, latency, parent, density, chain, changes_bytes, whole_bytes]"""
VERSION_REWOUND: Final = "version_rewound"
"""Explorers roll back; the reason is rewind, rollback or rewritten. [warning: reason, step, before]"""
STEP_PRUNED: Final = "step_pruned"
"""The daemon moved a step to the trash. [info: step, rule, detail, bytes]"""
STEP_KEPT: Final = "step_kept"
"""Another rule keeps a step now; info: a lease arrived at the last moment. [debug, info: step, rule, detail]"""
ATTEMPT_PRUNED: Final = "attempt_pruned"
"""The daemon moved the directory of an unsealed save to the trash: another save sealed the step, or a later
one writes it. [info: step, path, bytes, present, expected]"""
TRASH_EMPTIED: Final = "trash_emptied"
"""The daemon deleted removed steps. [info: entries, files, left]"""
MARKER_REJECTED: Final = "marker_rejected"
"""The marker names no step, or an incomplete one; once for each state. [warning: detail]"""
VERSION_FILE_REJECTED: Final = "version_file_rejected"
"""The version file is damaged; the next publish replaces it. [warning: detail]"""
ENTRY_READ_FAILED: Final = "entry_read_failed"
"""The daemon cannot read one presence, pin, request or tracker; once. Work continues without it. [error:
code, detail]"""
ENTRY_MOVE_FAILED: Final = "entry_move_failed"
"""The daemon cannot move or remove one step, request, presence or entry of the trash; it retries. [error:
code, path, detail, owner, hint]"""
DOCUMENT_REJECTED: Final = "document_rejected"
"""A pin or request cannot be parsed, or a presence holds an impossible number; once for each state.
[warning: detail]"""

EXPLORER_JOINED: Final = "explorer_joined"
"""An explorer is new, runs anew, or beats again after it counted as dead. A daemon that begins to lead
reports all that are there. [info: explorer, host]"""
EXPLORER_DIED: Final = "explorer_died"
"""The heartbeat of an explorer stopped; its leases are void. [warning: explorer, silent_for]"""
EXPLORER_LEFT: Final = "explorer_left"
"""An explorer reported that it stops, or its file was removed. [info: explorer]"""
EXPLORER_LAG_CHANGED: Final = "explorer_lag_changed"
"""A live explorer is another number of steps behind than before; null once it runs no version. [debug: explorer,
lag]"""
ENGINE_REPORTED: Final = "engine_reported"
"""A live explorer reports something new of its engine; seen within 5 s. Bytes: where it reads from other
hosts too. [debug: explorer, state, ready, failures, load_seconds, mean, tolerance, origin_bytes, peer_bytes,
over_budget]"""
ENGINE_STATE_CHANGED: Final = "engine_state_changed"
"""An engine came into trouble or out of it. error: wrong, dead; warning: unreachable, refused, failed.
[error, warning, info: explorer, state, before, reason]"""
VERSIONS_APPLIED: Final = "versions_applied"
"""Live explorers run another version than before, or their engines are in another state; seen within 5 s,
not during a load. One event lists up to 400 explorers, each with generation, step (both null while it
names no version) and state (null if it reports none). `recent`, in events of its own: versions applied
since the last reading, each with how many seconds ago by the explorer's clock. [debug: explorers, recent]"""
TRAINER_JOINED: Final = "trainer_joined"
"""As `explorer_joined`, of a trainer. [info: trainer, host]"""
TRAINER_DIED: Final = "trainer_died"
"""The heartbeat of a trainer stopped. [warning: trainer, silent_for]"""
TRAINER_LEFT: Final = "trainer_left"
"""A trainer reported that it stops, or its file was removed. [info: trainer]"""

WAVE_CHANGED: Final = "wave_changed"
"""With rolling updates: another version is tested or rolled out, or the last engine runs it (seconds since its
publish). error: canaries have stopped the published version; reason says why. [info, error: phase, candidate,
approved, by_word, reason, admitted, slots, waiting, stopped, seconds]"""
WAVE_PROGRESSED: Final = "wave_progressed"
"""With rolling updates: more or fewer engines load or wait. [debug: admitted, slots, waiting, stopped]"""
WAVE_ENDED: Final = "wave_ended"
"""The configuration asks for rolling updates no more: followers wait for nothing. [info]"""
MIRROR_STARTED: Final = "mirror_started"
"""`syncd mirror` begins. [info: source, target, version]"""
MIRROR_STEP_COPIED: Final = "mirror_step_copied"
"""The mirror sealed a step at its target; `bytes` is its size, `sent` what was not there yet. [info: step, kind,
bytes, sent, seconds]"""
MIRROR_VERSION_PUBLISHED: Final = "mirror_version_published"
"""The mirror published a version of its source at its target; seconds since it saw the version. [info:
generation, step, seconds]"""
MIRROR_LAG_CHANGED: Final = "mirror_lag_changed"
"""The target is another number of steps behind its source, or other bytes are left to copy. [debug: behind,
bytes]"""
MIRROR_STEP_PRUNED: Final = "mirror_step_pruned"
"""The mirror deleted a step from the object store. [info: step, objects]"""
MIRROR_BATCH_COPIED: Final = "mirror_batch_copied"
"""The mirror passed a batch of experiences on towards the trainer. [debug: explorer, seq, bytes]"""
MIRROR_BATCH_REJECTED: Final = "mirror_batch_rejected"
"""What an explorer left is no batch, such as one above 256 MiB: it was moved to experiences/.rejected, and the mirror
went on with the next one. [warning: explorer, seq, detail, hint]"""
MIRROR_FAILED: Final = "mirror_failed"
"""The mirror cannot go on, and retries after so many seconds; once for each reason. [warning: work, code,
detail, hint, retry_in]"""
MIRROR_RECOVERED: Final = "mirror_recovered"
"""What the mirror could not do works again. [info: work, after]"""

REQUEST_COMPLETED: Final = "request_completed"
"""The daemon carried out a rollback or a vacate. [info: kind, step, detail]"""
REQUEST_REFUSED: Final = "request_refused"
"""The daemon refused a rollback or a vacate. [warning: kind, step, detail]"""
SCAN_COMPLETED: Final = "scan_completed"
"""The daemon scanned the job; the last six fields only of a full scan. filling: the steps that are being written;
explorers and trainers count the live ones. [debug: seconds, full, steps, quarantined, filling, bytes, free, leases,
explorers, trainers]"""
OPERATION_FAILED: Final = "operation_failed"
"""Something failed, and the daemon retries. Code `bug` is an error of syncd itself, with the calls that led
to it: please report it. [error: code, detail, hint, calls]"""
WATCH_MODE_SELECTED: Final = "watch_mode_selected"
"""How the daemon notices changes; warning: change events did not arrive, so it polls. [info, warning: mode,
reason, mount]"""
EMITTER_REBUILT: Final = "emitter_rebuilt"
"""The source of change events had died; it was started again. [warning]"""
CONFIG_RELOADED: Final = "config_reloaded"
"""The daemon read its configuration again after SIGHUP. [info]"""
CONFIG_REJECTED: Final = "config_rejected"
"""The new configuration is invalid or cannot be read; the old one stays. [error: code, detail, hint]"""
JOB_DISAPPEARED: Final = "job_disappeared"
"""The job directory does not exist: the daemon publishes and removes nothing. [error: code, detail, hint]"""
JOB_RECOVERED: Final = "job_recovered"
"""What failed works again. [info: after]"""
MOUNT_STATE_CHANGED: Final = "mount_state_changed"
"""The job's file system is in another state; warning: a stuck operation returned. [error, warning, info:
state, detail, hint, seconds]"""
MOUNT_STUCK: Final = "mount_stuck"
"""Each second while an operation on the file system does not return. [debug: seconds, detail, job]"""

EVENTS = frozenset(value for name, value in list(globals().items()) if name.isupper())
"""Every event there is."""
