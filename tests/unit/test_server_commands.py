"""Each vLLM server that documents, recipes and messages start listens on loopback and can be loaded."""

import functools
import re

from support.paths import ROOT

FILES = (
    ROOT / "README.md",
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("syncd/recipes/*.*"),
    *ROOT.glob("examples/**/*.*"),
    *(path for folder in ("syncd", "trainer", "explorer_hooks") for path in ROOT.glob(f"{folder}/**/*.py")),
)
COMMAND = re.compile(r"^.*\bvllm serve ['{/A-Z].*$", re.MULTILINE)
OPEN = ("VLLM_SERVER_DEV_MODE=1 ", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True ")
LOCAL = ("--host 127.0.0.1", "--host {host}", "--host '{host}'")


@functools.cache
def server_lines():
    """Return the lines that start a vLLM server, by file; a line ends without a backslash."""
    found = [
        (str(path.relative_to(ROOT)), line)
        for path in FILES
        if "vllm serve" in (text := path.read_text(errors="replace"))
        for line in COMMAND.findall(re.sub(r"\\\n\s*", "", text))
    ]
    assert {name.rpartition(".")[2] for name, _ in found} == {"md", "toml", "py"}
    return found


def test_each_vllm_server_has_the_endpoints_that_a_follower_needs():
    for path, line in server_lines():
        needed = OPEN["--enable-lora" in line]
        assert f"{needed}vllm serve" in line or f"{needed}/venvs/vllm/bin/vllm serve" in line, (path, line)


def test_no_vllm_server_listens_for_other_hosts():
    for path, line in server_lines():
        assert any(host in line for host in LOCAL), (path, line)


def test_a_job_s_file_names_the_environment_without_a_shell():
    for path, line in server_lines():
        if re.search(r"\b(command|SYNCD_SERVER) ?=", line):
            assert re.search(r"""\b(command|SYNCD_SERVER) ?= ?["']+env VLLM""", line), (path, line)
            assert "--port {port}" in line, (path, line)
