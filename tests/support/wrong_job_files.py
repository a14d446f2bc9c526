"""The shortest job file, and what makes any reader refuse it, in whichever table it stands."""

LEAST = """
[job]
dir = "jobs/first"
[model]
path = "models/tiny"
[explorer]
tasks = "tasks.jsonl"
"""

WRONG = {
    "an unknown key of an explorer": (
        "[explorer.sampling]\nmax_token = 3", "unknown key explorer.sampling.max_token"
    ),
    "a wrong value of an explorer": (
        "[explorer.curriculum]\nfloor = 2", "explorer.curriculum.floor = 2 is not a number"
    ),
    "an unknown key of the trainer": ("[trainer]\nnprocs = 2", "unknown key trainer.nprocs"),
    "a wrong value of the trainer": ("[monitor]\nkinds = 3", "monitor.kinds = 3 is not a list"),
    "an unknown key of the daemon": (
        "[daemon]\nkeep_lost = 1", "daemon.keep_lost: unknown key 'keep_lost' in [daemon]"
    ),
    "a wrong value of the daemon": ("[daemon]\nkeep_last = 0", "daemon.keep_last: keep_last = 0 is less than 1"),
    "an unknown table": ("[trianer]\nnproc = 2", "unknown key trianer"),
}  # fmt: skip
