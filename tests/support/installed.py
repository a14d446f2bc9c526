"""syncd as its users have it: built into a wheel, and installed from that into an environment of its own."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from support.paths import ROOT

_SOURCES = (
    "syncd",
    "trainer",
    "explorer_hooks",
    "systemd",
    "examples/monitoring",
    "setup.cfg",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
_LIMIT = 120


NEEDED = sysconfig.get_path("purelib")
"""Where what syncd needs is installed for these tests."""


def install(place: Path, *more: str) -> Path:
    """Build a wheel and return an environment that has it.

    Args:
        place: An empty directory for both.
        *more: Directories in which what it needs is found, besides the one where these tests find it.
    """
    source, environment = place / "source", place / "environment"
    source.mkdir()
    for name in _SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    _run(*pip, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", place, source)
    _run(sys.executable, "-m", "venv", "--without-pip", environment)
    (wheel,) = place.glob("*.whl")
    _run(*pip, "--python", environment, "install", "--no-deps", "--no-index", wheel)
    packages = environment / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    # No line that starts with `import`: an editable installation of this very project stays out of the way.
    (packages / "needed.pth").write_text("\n".join([*more, NEEDED, ""]))
    return environment


def _run(*command: object) -> None:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_LIMIT)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
