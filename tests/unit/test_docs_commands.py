"""Commands, options and keys that a page names exist: what a reader copies is taken by the programs."""

import functools
import re

import click
import pytest
from support.doc_pages import PAGES
from support.paths import ROOT

pytest.importorskip("pydantic", reason="the job file needs pydantic")

from explorer_hooks.cli.main import explorer
from syncd.cli.main import syncd
from syncd.jobfile.model import KEYS
from trainer.cli.main import trainer
from trainer.plugins import POLICY_LOSSES

PROGRAMS = {"syncd": syncd, "trainer": trainer, "explorer": explorer}
COMMAND = re.compile(r"(?<![\w/.:-])(syncd|trainer|explorer) ([a-z][a-z-]+)\b([^#&|;`\n]*)")
CODE = re.compile(r"^ {4}(.*)$|`([^`\n]+)`", re.MULTILINE)
OPTION = re.compile(r"(?<!\S)--([a-z][\w.-]*)")
KEY = re.compile(r"`([a-z_]+(?:\.[a-z_]+)+)(?: = [^`\n]*)?`")
TABLES = {key.partition(".")[0] for key in KEYS.all}
FREE = re.compile(r"^(?:engine\.options|algorithm\.(?:options|loss_options)|monitor\.options)\.")
FILES = (".py", ".sbatch", ".json", ".jsonl", ".toml", ".log", ".md", ".safetensors")
ENTRY_POINTS = set(re.findall(r"^(\w+\.\w+) =$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)) | {
    POLICY_LOSSES.group
}
OF_OTHERS = ("import-keys.md", "migrate.md")
"""Pages that name the keys of other trainers."""


@functools.cache
def command_of(program: str, verb: str) -> click.Command | None:
    """Return a verb of a program, None for a word that is none."""
    return PROGRAMS[program].get_command(click.Context(PROGRAMS[program]), verb)


@functools.cache
def options_of(program: str, verb: str) -> set[str]:
    command = command_of(program, verb)
    assert command is not None
    return {
        option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
    } | {"--help"}


def known_key(key: str) -> bool:
    """Return whether a key, or a table of keys, is one of the job file's, or free."""
    return (
        key in KEYS.all or FREE.match(key) is not None or any(name.startswith(f"{key}.") for name in KEYS.all)
    )


def unknown(text: str) -> list[str]:
    """Return the options in code that no verb before them takes."""
    found = []
    for code in ("".join(groups) for groups in CODE.findall(text)):
        for program, verb, rest in COMMAND.findall(code):
            if command_of(program, verb) is None:
                continue
            for option in OPTION.findall(rest.partition(" -- ")[0]):
                taken = known_key(option) if "." in option else f"--{option}" in options_of(program, verb)
                if not taken:
                    found.append(f"{program} {verb} --{option}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_option_of_a_command_on_a_page_exists(page):
    assert [option for option in unknown(page.read_text()) if not option.endswith("section.key")] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_key_of_the_job_file_on_a_page_exists(page):
    named = set() if page.name in OF_OTHERS else set(KEY.findall(page.read_text())) - ENTRY_POINTS
    keys = {key for key in named if key.partition(".")[0] in TABLES and not key.endswith(FILES)}
    modules = {key for key in keys if list(ROOT.glob(f"{key.replace('.', '/')}*"))}
    assert {key for key in keys - modules if not known_key(key)} == set()


def test_what_does_not_exist_is_found():
    assert unknown("    trainer train job.toml --dry-run --nprocs 2 --sync.intervall 2") == [
        "trainer train --nprocs",
        "trainer train --sync.intervall",
    ]
    assert not known_key("explorer.gateway.ahead")
