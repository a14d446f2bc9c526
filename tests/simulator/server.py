"""What lies on the server of a simulation, as only an observer of all can read it."""

import json
from typing import Any

from simulator.record import JOB
from simulator.tree import Directory, File, Tree
from syncd.protocol.layout import parse_step_name


def read_json(tree: Tree, path: str) -> dict[str, Any] | None:
    """Return the JSON object in a file of the server, None where there is none."""
    file = tree.find(path)
    try:
        return dict(json.loads(file.data)) if isinstance(file, File) else None
    except ValueError:
        return None


def names_in(tree: Tree, path: str) -> list[str]:
    """Return the names in a directory of the server, temporary ones left out."""
    directory = tree.find(path)
    return [name for name in directory.children if name[0] != "."] if isinstance(directory, Directory) else []


def step_directories(tree: Tree) -> dict[int, Directory]:
    """Return the step directories of the job."""
    job = tree.find(JOB)
    children = job.children.items() if isinstance(job, Directory) else ()
    found = {parse_step_name(name): node for name, node in children}
    return {step: node for step, node in found.items() if step is not None and isinstance(node, Directory)}
