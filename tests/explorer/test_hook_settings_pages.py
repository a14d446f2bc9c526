"""The tables of hooks' settings in the documentation have the keys that each hook reads, and no others."""

import re

import pytest
from support.paths import ROOT

from explorer_hooks.finding import open_hook
from explorer_hooks.hooks.restarting import OWN
from syncd.errors import ConfigError

ADDRESSES = {"webhook": "http://127.0.0.1:9/load"}


def keys_read(hook):
    """Return the keys that a hook reads, as its refusal of an unknown one lists them."""
    form = f"{hook}={ADDRESSES[hook]}" if hook in ADDRESSES else hook
    with pytest.raises(ConfigError) as refused:
        open_hook(form, argv=("true",) if hook == "command" else (), settings={"none-such": "1"})
    return set(refused.value.hint.removeprefix("it has ").split(", "))


def section(page, heading):
    """Return the text between a heading and the next one of any level."""
    text = (ROOT / "docs" / page).read_text()
    return re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", text, re.DOTALL | re.MULTILINE)[1]


def keys_named(page, heading):
    """Return the keys in the first column of a section's tables."""
    rows = re.findall(r"^\| (`[^|]+) \|", section(page, heading), re.MULTILINE)
    return {key for row in rows for key in re.findall(r"`(\w+)(?:=[\w]+)?`", row)}


@pytest.mark.parametrize(
    ("hook", "page", "heading"),
    [
        ("vllm", "follow-vllm.md", "Settings"),
        ("sglang", "follow-other-engines.md", "SGLang"),
        ("lora", "lora.md", "Serve adapters"),
        ("sglang-lora", "lora.md", "Serve adapters"),
    ],
)
def test_the_table_of_a_server_has_the_keys_that_its_hook_reads(hook, page, heading):
    assert keys_named(page, heading) - {"reload"} == keys_read(hook)


def test_the_table_of_a_server_that_is_restarted_has_its_keys():
    assert keys_named("follow-vllm.md", "Restart the server for each version") == set(OWN)


def test_the_hook_of_a_program_has_the_settings_of_its_section():
    text = section("follow-other-engines.md", "command")
    assert keys_read("command") == {key for key in ("current", "state", "phases") if f"{key}=" in text}


def test_the_hook_of_a_web_service_has_the_setting_of_its_section():
    assert keys_read("webhook") == {"ask_timeout"}
    assert "`ask_timeout`" in section("follow-other-engines.md", "webhook")
