"""Steps of Trinity-RFT with a tinker service: the weights stay there, and the step holds their path.

`remote_sampler_path.txt` is written in place, and the marker after it; a path that is late behind its marker
is waited for.
"""

import re
from collections.abc import Callable

from syncd.daemon.foreign.layout import Layout
from syncd.daemon.foreign.look import File, Look, Verdict
from syncd.daemon.foreign.weights import Weights, gather
from syncd.daemon.snapshot import State
from syncd.protocol.disk import Disk
from syncd.protocol.layout import FULL_CHECKPOINT, parse_step_name

SAMPLER = "remote_sampler_path.txt"
CHECKPOINT = "remote_checkpoint_path.txt"
_LIMIT = 4096
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[!-~]+", re.ASCII)


def whole_path(disk: Disk, path: str, _size: int, _progress: Callable[[], None] = lambda: None) -> Verdict:
    """Say whether a file holds the path of remote weights, and name it.

    Raises:
        CorruptDataError: It is longer than any path.
    """
    text = disk.read(path, _LIMIT).decode("ascii", "replace").strip()
    if not _URI.fullmatch(text):
        return Verdict(State.FILLING, "it holds no path yet" if not text else "it holds no URI")
    return Verdict(names={text: 0})


def _uri(files: tuple[File, ...]) -> str:
    return next((name for file in files for name in file.verdict.names), "")


def _find(look: Look) -> Weights | None:
    names = look.names()
    if SAMPLER not in names and CHECKPOINT not in names:
        return None
    files = gather(look, "", (SAMPLER,), whole_path)
    return Weights("", files, 1, kind="remote", uri=_uri(files))


def _is_full(look: Look) -> bool:
    return look.has_file("", FULL_CHECKPOINT) and look.has_file("", CHECKPOINT)


TINKER = Layout("tinker", parse_step_name, _find, _is_full, "marker")
