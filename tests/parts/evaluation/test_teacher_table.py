"""The table [explorer.teacher]: what is wrong with it and no single key shows."""

import pytest

pytest.importorskip("pydantic", reason="explorers need pydantic")

from support.wrong_job_files import LEAST

from explorer_hooks.run import extensions
from explorer_hooks.run.load import load_file
from syncd.errors import ConfigError


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("[explorer.teacher]\nkind = 'sglang'", ["needs explorer.teacher.address"]),
        ("[explorer.teacher]\naddress = 'h:1'", ["explorer.teacher.address is no address"]),
        (
            "[explorer.teacher]\naddress = 'http://h:1'\n[algorithm]\ntemperature = 0.7",
            ["a teacher gives log-probs at temperature 1"],
        ),
    ],
)
def test_a_teacher_that_cannot_be_asked_is_refused(tmp_path, more, said):
    path = tmp_path / "job.toml"
    path.write_text(LEAST + more)
    with pytest.raises(ConfigError) as caught:
        load_file(str(path))
    for part in said:
        assert part in str(caught.value)


def test_a_teacher_that_nothing_installed_asks_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(extensions, "registered", lambda _: {})
    path = tmp_path / "job.toml"
    path.write_text(f'{LEAST}[explorer.teacher]\naddress = "http://127.0.0.1:1"\n')
    with pytest.raises(ConfigError, match=r"nothing that reads \[explorer.teacher\] is installed"):
        load_file(str(path))
