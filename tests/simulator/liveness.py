"""I7: once trouble has ended, what the trainer announced reaches everybody, and what nobody needs goes."""

from collections.abc import Iterator
from typing import Any

from simulator.record import JOB, STATE, Record
from simulator.server import names_in, read_json, step_directories
from simulator.tree import Directory, File, Tree, walk
from simulator.world import World
from syncd.config import DaemonConfig
from syncd.protocol.layout import FULL_CHECKPOINT, MANIFEST, TRACKER, parse_attempt_name

_REMOVED = 2
"""How deep a removed step lies in the trash: `<token>/<identity>/<step>`."""


def unsettled(world: World, record: Record, config: DaemonConfig) -> list[str]:
    """Return what still has to happen."""
    version = read_json(world.tree, f"{STATE}/version.json")
    if version is None:
        return ["nothing is published"]
    steps = step_directories(world.tree)
    return [
        *_newest(world, record, version),
        *_followers(world, version),
        *_trash(world.tree),
        *_terms(world.tree),
        *_unneeded(
            world.tree, steps, dict(_leftovers(world.tree, version, steps, config, record, world.misjudged))
        ),
        *_attempts(world.tree, version),
        *_requests(world.tree),
        *_resumable(world.tree, steps),
    ]


def _newest(world: World, record: Record, version: dict[str, Any]) -> Iterator[str]:
    announced = record.announced[0] if record.announced else None
    if announced in world.misjudged and announced in {item[0] for item in version["quarantine"]}:
        return  # a daemon has read it wrongly twice: nobody publishes it unasked
    manifest = read_json(world.tree, f"{JOB}/global_step_{version['step']}/{MANIFEST}")
    published = (version["step"], manifest["attempt"] if manifest else "")
    # After a rollback a person holds explorers where they are until the marker changes.
    if record.announced != published and version["held_marker"] != str((record.announced or ("",))[0]):
        yield f"the trainer has announced {record.announced}, published is {published}"


def _followers(world: World, version: dict[str, Any]) -> Iterator[str]:
    pair = {"generation": version["generation"], "step": version["step"]}
    for program in world.programs:
        if program.name.startswith("explorer") and program.wanted:
            presence = read_json(world.tree, f"{STATE}/explorers/{program.name}.json")
            if presence is None or presence["applied"] != pair:
                yield f"{program.name} has not applied {version['generation']}.{version['step']}"


def _trash(tree: Tree) -> Iterator[str]:
    trash = tree.find(f"{STATE}/trash")
    if isinstance(trash, Directory):
        yield from (f"{path} lies in the trash" for path, _ in walk(trash) if path.count("/") == _REMOVED)


def _terms(tree: Tree) -> Iterator[str]:
    lock = tree.find(f"{STATE}/daemon.lock")
    # What a claim that failed has left is swept by the next leader.
    if isinstance(lock, Directory) and len([name for name in lock.children if name[0] != "."]) != 1:
        yield f"terms: {sorted(lock.children)}"


def _leftovers(
    tree: Tree,
    version: dict[str, Any],
    steps: dict[int, Directory],
    config: DaemonConfig,
    record: Record,
    misjudged: set[int],
) -> Iterator[tuple[int, str]]:
    """Yield the steps that no rule but that of chains keeps, by a reckoning of its own, each with why."""
    abandoned = {tuple(item) for item in version["abandoned"]}
    pinned = {
        int(name.removeprefix("global_step_").removesuffix(".json"))
        for name in names_in(tree, f"{STATE}/pins")
    }
    fulls = sorted(step for step, node in steps.items() if FULL_CHECKPOINT in node.children)
    kept = {version["step"], (version["previous"] or version)["step"], *pinned}
    kept |= {version["last_good"]["step"]} if version["last_good"] else set()
    quarantined = {tuple(item[:2]) for item in version["quarantine"]}
    kept |= {record.announced[0]} if record.announced else set()
    kept |= set(fulls[-config.keep_full :] if config.keep_full else fulls) | _tracked(tree)
    sync = []
    for step, node in sorted(steps.items()):
        manifest = read_json(tree, f"{JOB}/global_step_{step}/{MANIFEST}")
        if manifest is None:
            if step < version["step"] and step not in kept:
                yield step, "is partial and stale"
        elif (step, manifest["digest"]) in abandoned:
            if step not in kept:
                yield step, "is abandoned"
        elif FULL_CHECKPOINT not in node.children and step <= version["step"] and step not in misjudged:
            sync += [step] if (step, manifest["digest"]) not in quarantined else []
    for step in sync[: -config.keep_last]:
        if step not in kept and not (config.keep_every and step % config.keep_every == 0):
            yield step, "is superseded"


def _unneeded(tree: Tree, steps: dict[int, Directory], left: dict[int, str]) -> Iterator[str]:
    """Yield the steps that should have gone, but for those that a kept delta is stored as changes of."""
    needed = set[int]()
    for step in sorted(steps, reverse=True):
        manifest = read_json(tree, f"{JOB}/global_step_{step}/{MANIFEST}") or {}
        if (step not in left or step in needed) and manifest.get("delta"):
            needed.add(manifest["delta"]["parent"])
    yield from (f"step {step} {why}" for step, why in sorted(left.items()) if step not in needed)


def _attempts(tree: Tree, version: dict[str, Any]) -> Iterator[str]:
    job = tree.find(JOB)
    for name in job.children if isinstance(job, Directory) else ():
        step = parse_attempt_name(name)
        if step is not None and step <= version["step"]:
            yield f"{name} is an attempt that nobody will seal"


def _requests(tree: Tree) -> Iterator[str]:
    for name in names_in(tree, f"{STATE}/requests"):
        request = read_json(tree, f"{STATE}/requests/{name}")
        if request and request["kind"] == "rollback":
            yield f"a request for a rollback to {request['step']} is open"


def _resumable(tree: Tree, steps: dict[int, Directory]) -> Iterator[str]:
    for step in _tracked(tree):
        directory = steps.get(step)
        if directory is None or FULL_CHECKPOINT not in directory.children:
            yield f"the trainer cannot resume from step {step}"


def _tracked(tree: Tree) -> set[int]:
    tracker = tree.find(f"{JOB}/{TRACKER}")
    return {int(tracker.data)} if isinstance(tracker, File) else set()
