"""The commands that add an extra to this installation: they name where it came from."""

import importlib.metadata
import json

import pytest

from syncd.extras import install_command, upgrade_command

CHECKOUT = {"url": "file:///home/me/my%20syncd", "dir_info": {"editable": True}}
COPIED = {"url": "file:///srv/syncd", "dir_info": {}}
FORGE = {
    "url": "https://forge.example/syncd",
    "vcs_info": {"vcs": "git", "requested_revision": "main", "commit_id": "ab12"},
}
WHEEL = {"url": "file:///tmp/syncd-1.0-py3-none-any.whl", "archive_info": {}}


@pytest.mark.parametrize(
    ("origin", "install", "upgrade"),
    [
        (CHECKOUT, "pip install -e '/home/me/my syncd[plot]'", "git -C '/home/me/my syncd' pull"),
        (COPIED, "pip install '/srv/syncd[plot]'", "git -C /srv/syncd pull"),
        (
            FORGE,
            "pip install 'syncd[plot] @ git+https://forge.example/syncd@ab12'",
            "pip install --upgrade 'syncd @ git+https://forge.example/syncd'",
        ),
        (
            WHEEL,
            "pip install 'syncd[plot] @ file:///tmp/syncd-1.0-py3-none-any.whl'",
            "pip install --upgrade syncd",
        ),
        (None, "pip install 'syncd[plot]'", "pip install --upgrade syncd"),
    ],
)
def test_the_commands_name_the_origin_that_pip_recorded(monkeypatch, origin, install, upgrade):
    class Distribution:
        def read_text(self, name):
            return json.dumps(origin) if name == "direct_url.json" and origin else None

    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: Distribution())
    assert (install_command("plot"), upgrade_command()) == (install, upgrade)


def test_a_checkout_that_is_not_installed_gets_the_plain_command(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    assert install_command("plot") == "pip install 'syncd[plot]'"
