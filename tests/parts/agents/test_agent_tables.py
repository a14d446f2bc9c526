"""The tables [explorer.agent] and [explorer.gateway]: every reader checks them, and `explorer serve` all others."""

import pytest

pytest.importorskip("pydantic", reason="explorers need pydantic")

from support.wrong_job_files import LEAST, WRONG

from explorer_hooks.parts.agents.load import load_served_file
from explorer_hooks.run import extensions
from explorer_hooks.run.load import load_file
from syncd.errors import ConfigError
from trainer.config.load import load_config

OWN = {
    "an unknown key of agents": ("[explorer.agent]\ncomand = 'x'", "unknown key explorer.agent.comand"),
    "a wrong value of the gateway": (
        "[explorer.gateway]\nhold = 0",
        "explorer.gateway.hold = 0 is not a number",
    ),
}


def refusal(path, load, more):
    path.write_text(LEAST + more)
    with pytest.raises(ConfigError) as caught:
        load(str(path))
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 78
    return str(caught.value)


@pytest.mark.parametrize("load", [load_file, load_served_file, load_config])
@pytest.mark.parametrize("wrong", OWN)
def test_each_reader_finds_what_is_wrong_in_the_tables_of_agents(tmp_path, wrong, load):
    more, said = OWN[wrong]
    assert said in refusal(tmp_path / "job.toml", load, more)


def test_agents_that_nothing_installed_runs_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(extensions, "registered", lambda _: {})
    said = refusal(tmp_path / "job.toml", load_file, '[explorer.agent]\nfunction = "m:f"')
    assert "nothing that reads [explorer.agent] is installed" in said


@pytest.mark.parametrize("wrong", WRONG)
def test_serving_finds_what_is_wrong_in_any_table(tmp_path, wrong):
    more, said = WRONG[wrong]
    assert said in refusal(tmp_path / "job.toml", load_served_file, more)
