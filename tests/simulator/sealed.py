"""I9: what is sealed does not change, and nothing is added to it that an engine would load."""

from collections.abc import Iterator

from simulator.record import JOB
from simulator.server import read_json
from simulator.tree import Change, Directory, File, Tree, path_of
from syncd.protocol.layout import ACTOR, MANIFEST, parse_step_name

_LOADED = (".safetensors", ".safetensors.index.json")


def changes_of_sealed(tree: Tree, change: Change) -> Iterator[str]:
    """Yield how one change of a name changes a step that is sealed."""
    inside = _place_in_step(change)
    if inside is None:
        return
    step, name = inside
    if name == MANIFEST:
        if isinstance(change.before, File) and not _is_same(change.before, change.after):
            yield f"the manifest of {step} is {'removed' if change.after is None else 'written again'}"
        return
    manifest = read_json(tree, f"{JOB}/{step}/{MANIFEST}")
    if manifest is None:
        return
    containers = manifest["shortcut"]["containers"] if manifest.get("shortcut") else ()
    named = {record["name"] for record in (*manifest["shards"], *manifest["files"], *containers)}
    if name in named:
        yield f"{name} of {step} is {'removed' if change.after is None else 'replaced'}"
    elif change.after is not None and _is_loaded(name):
        yield f"{name} is added to {step}"


def _place_in_step(change: Change) -> tuple[str, str] | None:
    """Return the step directory of the job that holds a changed name, and the name relative to it."""
    where = path_of(change.directory)
    if not where.startswith(f"{JOB}/"):
        return None
    step, _, rest = where.removeprefix(f"{JOB}/").partition("/")
    if parse_step_name(step) is None:
        return None
    return step, f"{rest}/{change.name}" if rest else change.name


def _is_loaded(name: str) -> bool:
    """Say whether an engine that loads the directory would take a file."""
    directory, _, last = name.rpartition("/")
    return directory == ACTOR and last[0] != "." and last.endswith(_LOADED)


def _is_same(before: File, after: File | Directory | None) -> bool:
    return isinstance(after, File) and after.data == before.data
