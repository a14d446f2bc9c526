"""The Chromium that browser tests and screenshots use: the one on PATH, else Playwright's own."""

import shutil

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
]
_NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")


def executable() -> str | None:
    """Return the path of a Chromium, None for Playwright's own."""
    return next((found for name in _NAMES if (found := shutil.which(name))), None)
