"""Looks at a job directory and says what is wrong with it, knowing only docs/protocol.md.

It shares no code with what it checks: json, os and xxhash.
"""

import hashlib
import json
import os
import re
import struct
from dataclasses import dataclass, field

import xxhash

Pair = tuple[int, int]


@dataclass(frozen=True)
class Past:
    """What was true of a job before something happened to it.

    Args:
        pair: The version's pair then.
        leased: Steps that a living explorer reads.
    """

    pair: Pair | None = None
    leased: frozenset[int] = field(default_factory=frozenset)


def problems(job: str, past: Past | None = None, *, marker_leads: bool = True) -> list[str]:
    """Return each broken promise of a job that was left by a crash at any instant.

    Args:
        job: The job directory.
        past: What was true before; nothing may have gone back.
        marker_leads: This protocol's writer writes the marker, so it never names a step that is not whole.
    """
    past = past or Past()
    found = [f"sealed step {step}: {wrong}" for step in sealed(job) if (wrong := why_not_whole(job, step))]
    found += [f"leased step {step}: {wrong}" for step in past.leased if (wrong := why_not_whole(job, step))]
    if marker_leads:
        found += _marker_problems(job)
    return found + _version_problems(job, past)


def _marker_problems(job: str) -> list[str]:
    try:
        named = marker(job)
    except ValueError as error:
        return [f"the marker is damaged: {error}"]
    wrong = named is not None and why_not_whole(job, named)
    return [f"the marker names step {named}: {wrong}"] if wrong else []


def _version_problems(job: str, past: Past) -> list[str]:
    try:
        document = version(job)
    except ValueError as error:
        return [f"version.json is damaged: {error}"]
    if document is None:
        return [f"version.json has gone, was at {past.pair}"] if past.pair else []
    found, pair = [], (document["generation"], document["step"])
    if past.pair and pair < past.pair:
        found.append(f"the version went back from {past.pair} to {pair}")
    if wrong := why_not_whole(job, document["step"]):
        found.append(f"version {pair} is announced: {wrong}")
    elif document["digest"] != manifest(job, document["step"])["digest"]:
        found.append(f"version {pair} names another digest than its manifest")
    return found


def why_not_whole(job: str, step: int) -> str | None:
    """Return why a step cannot be loaded, None when every byte of it is what its manifest says."""
    try:
        document = manifest(job, step)
    except FileNotFoundError:
        return "no manifest"
    except ValueError as error:
        return f"manifest: {error}"
    body = {key: value for key, value in document.items() if key != "digest"}
    if document["digest"] != own_digest(body):
        return "the manifest's own digest does not match"
    if document["step"] != step or len(document["shards"]) != document["world_size"]:
        return "the manifest is not of this step and all its writers"
    wrong = (_why_not_file(job, step, record) for record in document["shards"] + document["files"])
    return next((reason for reason in wrong if reason), None) or _why_mixed(job, step, document)


def own_digest(body: dict) -> str:
    """Return the digest that a sealed document of this content must carry."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":")) + "\n"
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _why_not_file(job: str, step: int, record: dict) -> str | None:
    try:
        with open(f"{_path(job, step)}/{record['name']}", "rb") as file:
            data = file.read()
    except OSError as error:
        return f"{record['name']}: {error.strerror}"
    if len(data) != record["size"]:
        return f"{record['name']}: {len(data)} bytes of {record['size']}"
    if f"xxh3_128:{xxhash.xxh3_128(data).hexdigest()}" != record["digest"]:
        return f"{record['name']}: content does not match its digest"
    return None


def _why_mixed(job: str, step: int, document: dict) -> str | None:
    """Compare what each shard says of itself with the manifest; only shards of tests/programs say it."""
    for record in document["shards"]:
        with open(f"{_path(job, step)}/{record['name']}", "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            said = json.loads(file.read(length)).get("__metadata__", {})
        if "attempt" in said and (said["step"], said["attempt"]) != (str(step), document["attempt"]):
            return f"{record['name']}: of another attempt"
    return None


def sealed(job: str) -> list[int]:
    """Return the steps that have a manifest, in order."""
    steps = [int(name[12:]) for name in os.listdir(job) if re.fullmatch(r"global_step_\d+", name)]
    return sorted(step for step in steps if os.path.exists(f"{_path(job, step)}/manifest.json"))


def newest_whole(job: str) -> int | None:
    """Return the newest step that can be loaded."""
    return max((step for step in sealed(job) if why_not_whole(job, step) is None), default=None)


def marker(job: str) -> int | None:
    """Return the step that the marker names, None without one; a damaged one raises ValueError."""
    try:
        with open(f"{job}/latest_state_dict_iteration.txt", encoding="ascii") as file:
            return int(file.read())
    except FileNotFoundError:
        return None


def version(job: str) -> dict | None:
    """Return the version document, None before the first; a damaged one raises ValueError."""
    try:
        with open(f"{job}/.syncd/version.json", encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return None


def pair(job: str) -> Pair | None:
    """Return (generation, step) of the version, None before the first."""
    document = version(job)
    return (document["generation"], document["step"]) if document else None


def manifest(job: str, step: int) -> dict:
    """Return the manifest of a step."""
    with open(f"{_path(job, step)}/manifest.json", encoding="utf-8") as file:
        return json.load(file)


def steps(job: str) -> list[int]:
    """Return the steps that have a directory, in order."""
    return sorted(int(name[12:]) for name in os.listdir(job) if re.fullmatch(r"global_step_\d+", name))


def leftovers(job: str) -> list[str]:
    """Return the temporary files below a job and what its trash holds, relative to the job."""
    found = []
    for place, directories, files in os.walk(job):
        found += [os.path.relpath(f"{place}/{name}", job) for name in files if name.endswith(".tmp")]
        found += [
            os.path.relpath(f"{place}/{name}", job) for name in directories if name.startswith(".claim-")
        ]
    return sorted(found)


def _path(job: str, step: int) -> str:
    return f"{job}/global_step_{step}"
