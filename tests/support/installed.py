"""syncd as its users have it: a source distribution, the wheel built from that, and an environment with the wheel."""

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from support.paths import ROOT

_LIMIT = 120
_BUILD = "from setuptools import build_meta; build_meta.build_sdist('..')"
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.egg-info")

NEEDED = sysconfig.get_path("purelib")
"""Where what syncd needs is installed for these tests."""

_SHARED = [NEEDED, *(path for path in sys.path if path.endswith("site-packages") and path != NEEDED)]
"""The same, and what this environment has from another one."""


def sources() -> Iterator[str]:
    """Yield the files and directories of this checkout that MANIFEST.in takes."""
    for line in (ROOT / "MANIFEST.in").read_text().splitlines():
        word, *names = line.split()
        if word in ("graft", "include"):
            yield from names
    yield "MANIFEST.in"


def install(place: Path, *more: str) -> Path:
    """Build a source distribution and a wheel of it in a directory, and return an environment that has the wheel.

    Args:
        place: An empty directory for all three.
        *more: Directories in which what it needs is found, besides the one where these tests find it.
    """
    environment = place / "environment"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    archive = _source_distribution(place)
    _run(*pip, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", place, archive)
    _run(sys.executable, "-m", "venv", "--without-pip", environment)
    (wheel,) = place.glob("*.whl")
    _run(*pip, "--python", environment, "install", "--no-deps", "--no-index", wheel)
    # No line that starts with `import`: an editable installation of this very project stays out of the way.
    (packages_of(environment) / "needed.pth").write_text("\n".join([*more, *_SHARED, ""]))
    return environment


def packages_of(environment: Path) -> Path:
    """Return the directory of an environment that its packages are in."""
    return environment / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def _source_distribution(place: Path) -> Path:
    """Build it from a copy: setuptools writes into the directory that it builds from."""
    source = place / "source"
    source.mkdir()
    for name in sources():
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=_LEFT_OUT)
        else:
            shutil.copy(ROOT / name, source / name)
    _run(sys.executable, "-c", _BUILD, directory=source)
    (archive,) = place.glob("*.tar.gz")
    return archive


def _run(*command: object, directory: Path | None = None) -> None:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_LIMIT, cwd=directory)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
