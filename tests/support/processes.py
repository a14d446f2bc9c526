"""What the tests of real processes share: how a job is made and which commands are run over it."""

import json
import os
import shutil

from support import checker
from support.forked import run_forked
from support.paths import TESTS
from support.sweep import Outcome, python, run
from syncd.protocol.layout import Job

PROGRAMS = f"{TESTS}/programs"
LEASED, PUBLISHED, NEWEST, NEXT = 1, 4, 7, 8
FULL = os.environ.get("SYNCD_SWEEP") == "full"
"""Everything at every point, for hours of patience; by default what a pull request can wait for."""

# A program that meets an error says so and ends with its documented code, never with a traceback.
_HONEST_ENDS = (0, 65, 74, 75)


def write_steps(job, first, last, *options):
    """Return the command that writes steps as two writers."""
    return python(f"{PROGRAMS}/write_steps.py", job, str(first), str(last), "2", *options)


def syncd(*arguments):
    """Return a command line of `syncd`, all of it in one process."""
    return python(f"{PROGRAMS}/alone.py", *arguments)


def daemon(job, *options, **config):
    """Return the command of a daemon: `--once` for one cycle; settings by the name of the option."""
    settings = {"keep_last": 1, "trash_grace": 0, **config}
    flags = [text for key, value in settings.items() for text in (f"--{key.replace('_', '-')}", str(value))]
    return syncd("watch", job, *options, *flags)


def must(command, how=run):
    """Run a command that has to succeed."""
    done = how(command)
    assert done.returncode == 0, f"{command} ended with {done.returncode}: {done.stderr[-3000:]}"


def lease(job, identity, *steps):
    """Publish the presence of an explorer that reads steps."""
    directory = f"{job}/.syncd/explorers"
    os.makedirs(directory, exist_ok=True)
    document = {"protocol": 1, "identity": identity, "status": "running", "beat": 1, "updated_at": 0.0}
    with open(f"{directory}/{identity}.json", "w", encoding="ascii") as file:
        json.dump({**document, "leases": list(steps)}, file)


def busy_job(job):
    """Make a job with a bit of everything: published, leased, superseded, newer, half written, trash."""
    os.makedirs(job)
    must(write_steps(job, LEASED, PUBLISHED))
    lease(job, "reader", LEASED)
    must(daemon(job, "--once", trash_grace=75))
    must(write_steps(job, PUBLISHED + 1, NEWEST))
    half = Job.at(job).attempt(NEXT, "half")
    shutil.copytree(f"{job}/global_step_{NEWEST}", half)
    os.unlink(f"{half}/manifest.json")
    os.unlink(f"{half}/actor/.receipts/00002-of-00002.json")


def goes_on(job):
    """Go on with a busy job undisturbed: write the next step, run the daemon once; return what is wrong then."""
    must(write_steps(job, NEXT, NEXT), run_forked)
    must(daemon(job, "--once"), run_forked)
    return [
        *checker.problems(job, PAST),
        *unequal("the version", checker.pair(job), (1, NEXT)),
        *damaged(job, LEASED, NEXT),
        *unequal("what is left to clean up", checker.leftovers(job), []),
    ]


PAST = checker.Past(pair=(1, PUBLISHED), leased=frozenset({LEASED}))


def copy_of(job):
    """Return what copies a job into an empty directory."""
    return lambda place: shutil.copytree(job, place, dirs_exist_ok=True, symlinks=True) and None


def damaged(job, *steps):
    """Return what is wrong with steps that must be whole."""
    return [f"step {step}: {wrong}" for step in steps if (wrong := checker.why_not_whole(job, step))]


def dishonest(outcome: Outcome):
    """Return what is wrong with how a disturbed process ended."""
    if outcome.status == -9 or (outcome.status in _HONEST_ENDS and "Traceback" not in outcome.stderr):
        return []
    return [f"ended with {outcome.status}: {outcome.stderr[-800:]}"]


def unequal(what, found, expected):
    """Return a problem if something is not what it must be."""
    return [] if found == expected else [f"{what} is {found}, not {expected}"]
