"""A real browser by Playwright, and pages in it that must not complain."""

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_MS = 30_000
"""Of one wait for an element or a page."""

BOUND = 120.0
"""Seconds of all that one test asks of a browser: most calls of Playwright wait for its answer without a bound."""

_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
]
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")

CONTRAST = """() => {
  const channel = (value) => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const back = (one) => {
    for (let at = one; at; at = at.parentElement) {
      const found = numbers(getComputedStyle(at).backgroundColor);
      if (found.length < 4 || found[3] === 1) return found;
    }
  };
  const speaks = (one) => [...one.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
  const poor = [];
  for (const one of document.body.querySelectorAll("*")) {
    if (!speaks(one) || !one.checkVisibility() || one.closest("noscript")) continue;
    const [a, b] = [light(numbers(getComputedStyle(one).color)), light(back(one))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) poor.push([one.textContent, (a + 0.05) / (b + 0.05)]);
  }
  return poor;
}"""
"""Returns each text of the page whose contrast to what is behind it is below 4.5."""


@contextlib.contextmanager
def started_browser() -> Iterator[Any]:
    """Return a browser; skip the test where none starts."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="no playwright: pip install -e '.[browser]'"
    )
    path = next((found for name in _NAMES if (found := shutil.which(name))), None)
    with contextlib.ExitStack() as stack:
        with bounded("the start of a browser"):
            driver = stack.enter_context(playwright.sync_playwright())
            try:
                started = driver.chromium.launch(executable_path=path, args=_FLAGS, timeout=TIMEOUT_MS)
            except playwright.Error as error:
                pytest.skip(f"no browser starts here: {error.message.splitlines()[0]}")
        yield started
        with bounded("the end of a browser"), contextlib.suppress(playwright.Error):  # it may have been ended
            started.close()


class bounded(contextlib.AbstractContextManager[None]):  # noqa: N801 -- used as a function
    """Ends this process's browsers, with which every call that waits for one fails, if a block takes too long.

    Args:
        what: What waits, for the failure.
        seconds: How long it may take.
    """

    def __init__(self, what: str, seconds: float = BOUND) -> None:
        self._what, self._seconds, self._is_late = what, seconds, False
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self._timer.start()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._timer.cancel()
        if self._is_late:
            raise AssertionError(f"{self._what}: no answer within {self._seconds:g} s") from error

    def _end(self) -> None:
        self._is_late = True
        for pid in _drivers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _drivers() -> Iterator[int]:
    """Yield Playwright's processes, whose browsers end with them."""
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            with contextlib.suppress(OSError):
                if b"run-driver" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    yield int(pid)


class Pages:
    """Pages of a browser, and what went wrong in them.

    Args:
        browser: The browser.
    """

    def __init__(self, browser: Any) -> None:
        self._browser, self._bound = browser, bounded("what a test asks of a browser")
        self._contexts: list[Any] = []
        self.wrong: list[str] = []
        self.asked: list[str] = []

    def open(self, url: str, size: tuple[int, int], scheme: str = "light", **answers: Any) -> Any:
        """Return a page that has loaded an address.

        Args:
            url: The address.
            size: Width and height of the view.
            scheme: light or dark.
            answers: Documents that are given in place of the server's, by the name of the path without its suffix.
        """
        width, height = size
        context = self._browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self._contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.on("console", self._logged)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("dialog", self._dialog)
        page.on("request", lambda request: self.asked.append(request.url))
        for name, answer in answers.items():
            page.route(f"**/{name}.json*", _answering(answer))
        page.goto(url)
        return page

    def close(self) -> None:
        """Close all pages; nothing may have gone wrong in them, and no other host have been asked."""
        with self._bound:
            for context in self._contexts:
                context.close()
        assert self.wrong == []
        assert [address for address in self.asked if not address.startswith("http://127.0.0.1:")] == []

    def _logged(self, message: Any) -> None:
        if "Failed to load" not in message.text:
            self.wrong.append(message.text)

    def _dialog(self, dialog: Any) -> None:
        self.wrong.append(f"a dialog: {dialog.message}")
        dialog.dismiss()


def _answering(answer: Any) -> Callable[[Any], None]:
    return lambda route: route.fulfill(json=answer)
