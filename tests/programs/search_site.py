"""Asks the site's own search what people ask, in a browser: each answer must be among the first three hits.

    make docs && PYTHONPATH=.:tests python tests/programs/search_site.py

Prints the first three hits of each question, and ends with 1 if an answer is not among them. Needs playwright and a
Chromium.
"""

import functools
import http.server
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.browser import started_browser
from support.paths import ROOT

SITE = ROOT / "out" / "site"
HITS = 3

ANSWERS = {
    "vLLM does not load the new weights": "troubleshooting/#vllm-or-sglang-does-not-load-the-new-weights",
    "resume on fewer GPUs": "checkpoints/#resume-on-fewer-or-more-gpus",
    "disk is full": "troubleshooting/#the-disk-is-full",
    "which engines are behind": "troubleshooting/#which-engines-are-behind",
    "roll back to an earlier version": "troubleshooting/#roll-back-to-an-earlier-version",
    "NFS server hangs": "troubleshooting/#mount-stuck",
    "is Lustre supported": "tested/",
    "the reward does not rise": "troubleshooting/#the-reward-does-not-rise",
    "in which order to upgrade": "daemon/#upgrade-and-roll-back",
    "explorer is dead": "troubleshooting/#an-explorer-or-a-trainer-is-dead",
    "who can read the job directory": "security/#who-can-do-what",
    "export a model for Hugging Face": "checkpoints/#export-a-model",
    "own reward function": "tasks/#rewards",
    "how old may rollouts be": "algorithms/#off-policy-corrections",
    "import a verl config": "migrate/#import-a-configuration",
}
"""What is asked, and the place that answers it."""

READ = """() => {
  const found = [];
  const walk = (root) => {
    for (const one of root.querySelectorAll("*")) {
      if (one.shadowRoot) walk(one.shadowRoot);
      if (root !== document && one.tagName === "A") found.push(one.href);
    }
  };
  walk(document);
  return found;
}"""
"""Returns the addresses of the hits, which are in the search's own part of the page."""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def served() -> Iterator[str]:
    """Serve the site, and yield its address."""
    handler = functools.partial(_Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def hits(browser: Any, url: str, question: str) -> list[str]:
    """Return the addresses of the hits, relative to the site, the best first."""
    page = browser.new_page()
    page.goto(url)
    page.wait_for_load_state("networkidle")
    page.keyboard.press("/")
    page.wait_for_timeout(300)
    page.keyboard.type(question)
    page.wait_for_timeout(1500)
    found = page.evaluate(READ)
    page.close()
    return [_place(link.removeprefix(url)) for link in found]


def _place(link: str) -> str:
    page, _, anchor = link.partition("#")
    return f"{page.partition('?')[0]}#{anchor}".rstrip("#")


def main() -> int:
    """Ask everything, and return the exit code."""
    missing = 0
    with started_browser() as browser, served() as url:
        for question, answer in ANSWERS.items():
            first = hits(browser, url, question)[:HITS]
            is_there = answer in first
            missing += not is_there
            print(f"{'found' if is_there else 'MISSING'}: {question}", *first, sep="\n    ")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
