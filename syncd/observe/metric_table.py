"""The metrics of a daemon as a table: their names without `syncd_`, meanings, labels, and the fields that they show.

docs/metrics.md is made from it.
"""

from collections.abc import Iterator

from syncd.observe import event_names

LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SCAN_BUCKETS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)

COUNTERS = {
    "versions_published": (
        "Versions published, by reason: first, newer, rewind, rewritten, rollback, behind.",
        "reason",
    ),
    "published_bytes": ("Bytes of the steps that were published.",),
    "saved_bytes": (
        "Bytes that changes saved: a delta's were neither written nor read, a shortcut's not read.",
        "kind",
    ),
    "versions_rewound": (
        "Times that explorers rolled back, by reason: rewind, rewritten, rollback.",
        "reason",
    ),
    "steps_pruned": ("Steps moved to the trash, by the retention rule that decided.", "rule"),
    "pruned_bytes": ("Bytes of the steps moved to the trash, by rule.", "rule"),
    "steps_damaged": ("Times that a step was found damaged.",),
    "mirror_bytes": ("Bytes that a mirror copied to its target.",),
    "mirror_steps": ("Steps that a mirror sealed at its target.",),
    "mirror_versions": ("Versions that a mirror published at its target.",),
    "mirror_batches": ("Batches of experiences that a mirror passed on towards the trainer.",),
    "errors": ("Errors, by their stable code.", "code"),
    "textfile_errors": ("Times that the textfile could not be written.",),
}
GAUGES = {
    "is_leader": ("1 while this daemon leads the job; 0 of a stand-by.",),
    "filling_step": ("Newest step that is being written; -1 without one.",),
    "shards_present": ("Writers or shards of that step that exist.",),
    "shards_expected": ("Writers or shards of that step in all; 0 while unknown.",),
    "shards_ratio": ("shards_present / shards_expected.",),
    "explorer_lag_steps": ("Steps that an explorer is behind; removed with the explorer.", "explorer"),
    "engine_state": (
        "1 for the state that an explorer's engine is in, 0 for the others.",
        "explorer",
        "state",
    ),
    "engine_ready": ("1 while an explorer's engine may get work.", "explorer"),
    "engine_load_failures": ("Loads that failed or were refused since the explorer's start.", "explorer"),
    "engine_load_seconds": ("Seconds of the engine's last load.", "explorer"),
    "engine_proof_difference": ("Mean difference of the engine's last proof, in nats.", "explorer"),
    "engine_proof_tolerance": ("Mean difference up to which a version is proven, in nats.", "explorer"),
    "explorer_origin_bytes": (
        "Bytes that an explorer with peers has read from the job's file system since its start.",
        "explorer",
    ),
    "explorer_peer_bytes": ("Bytes that it has read from other hosts since then.", "explorer"),
    "explorer_over_budget": (
        "1 if it read more of the last version from the file system than a quarter beyond its share.",
        "explorer",
    ),
    "mount_state": ("1 for the state that the job's file system is in, 0 for the others.", "state"),
    "mount_stuck_seconds": ("Seconds that an operation on the file system has not returned; 0 without one.",),
    "info": ("Constant 1.", "version"),
}
# Without a value until an event gives one: a 0 would raise alerts that nobody can explain.
UNKNOWN = {
    "term": ("Fencing token of this daemon's term.",),
    "version_generation": ("Generation of the newest version that this daemon published.",),
    "version_step": ("Step of that version.",),
    "version_density": (
        "Share of words that the version's changes change; NaN without a delta or shortcut.",
    ),
    "version_ratio": ("Bytes of the version stored whole / bytes of its changes; NaN without them.",),
    "version_chain_deltas": (
        "Deltas from the version's keyframe to it; 0 of a shortcut, NaN without changes.",
    ),
    "mirror_behind_steps": ("Steps that a mirror's target is behind its source.",),
    "mirror_left_bytes": (
        "Bytes that a mirror must copy before it can publish its source's newest version.",
    ),
    "steps": ("Step directories in the job.",),
    "quarantined_steps": ("Steps in quarantine that were not removed yet.",),
    "job_bytes": ("Bytes of all steps.",),
    "free_bytes": ("Bytes free on the job's file system.",),
    "leases": ("Leases that live explorers hold.",),
    "explorers_alive": ("Live explorers.",),
    "rolling_admitted": ("Explorers that may load a version now; NaN without rolling updates.",),
    "rolling_paused": ("Of them those that gave up serving another version for it.",),
    "rolling_waiting": ("Explorers that wait for their turn.",),
    "rolling_stopped": ("1 while canaries have stopped the published version, else 0.",),
    "rolling_seconds_to_last": ("Seconds from the last publish that reached every engine until it had.",),
    "trainers_alive": ("Live trainers.",),
}
HISTOGRAMS = {
    "publish_latency_seconds": (
        "From the replacement of the marker to that of the version; only where one clock dates both.",
        LATENCY_BUCKETS,
    ),
    "scan_duration_seconds": (
        "One scan of the job; full is true if everything was examined.",
        SCAN_BUCKETS,
        "full",
    ),
}
_OF_WAVE = {
    "admitted": "rolling_admitted",
    "slots": "rolling_paused",
    "waiting": "rolling_waiting",
    "stopped": "rolling_stopped",
    "seconds": "rolling_seconds_to_last",
}
OF_FIELD = {
    event_names.LEADERSHIP_ACQUIRED: {"term": "term"},
    event_names.VERSION_PUBLISHED: {"generation": "version_generation", "step": "version_step"},
    event_names.MIRROR_LAG_CHANGED: {"behind": "mirror_behind_steps", "bytes": "mirror_left_bytes"},
    event_names.MOUNT_STUCK: {"seconds": "mount_stuck_seconds"},
    event_names.WAVE_CHANGED: _OF_WAVE,
    event_names.WAVE_PROGRESSED: _OF_WAVE,
    event_names.SCAN_COMPLETED: {
        "steps": "steps",
        "quarantined": "quarantined_steps",
        "bytes": "job_bytes",
        "free": "free_bytes",
        "leases": "leases",
        "explorers": "explorers_alive",
        "trainers": "trainers_alive",
    },
}
"""By event: the gauge that shows each of its fields."""

OF_EXPLORER = {
    "lag": "explorer_lag_steps",
    "ready": "engine_ready",
    "failures": "engine_load_failures",
    "load_seconds": "engine_load_seconds",
    "mean": "engine_proof_difference",
    "tolerance": "engine_proof_tolerance",
    "origin_bytes": "explorer_origin_bytes",
    "peer_bytes": "explorer_peer_bytes",
    "over_budget": "explorer_over_budget",
}
"""The gauges with the label `explorer`, by the field of an event."""


def described() -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """Yield each metric for the documentation: name, kind, labels, meaning."""
    tables = (("counter", COUNTERS), ("gauge", GAUGES), ("gauge", UNKNOWN))
    for kind, table in tables:
        for name, (text, *labels) in table.items():
            yield f"syncd_{name}{'_total' if kind == 'counter' else ''}", kind, tuple(labels), text
    for name, (about, _, *named) in HISTOGRAMS.items():
        yield f"syncd_{name}", "histogram", tuple(map(str, named)), str(about)
