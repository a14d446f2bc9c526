"""Nothing of this repository writes, reads or documents a figure by a name of an earlier release."""

import re
import subprocess

from support.paths import ROOT

from syncd.figures import RENAMED, by_present_names

HISTORY = {"CHANGELOG.md", "syncd/figures.py"}
"""Files that may name them: what was, and what the names became."""

OLD = re.compile(rf"(?<![\w/-])({'|'.join(map(re.escape, RENAMED))})(?![\w/])")


def test_no_product_file_example_or_page_has_an_old_name():
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], check=True, capture_output=True, text=True)
    kept = ("syncd/", "trainer/", "explorer_hooks/", "examples/", "benchmarks/", "docs/")
    texts = (".py", ".md", ".toml", ".json", ".yml", ".js", ".sh")
    paths = [path for path in listed.stdout.split("\0") if path.startswith(kept) and path.endswith(texts)]
    assert len(paths) > 400
    found = {path: OLD.findall((ROOT / path).read_text()) for path in paths if (ROOT / path).exists()}
    assert {path: names for path, names in found.items() if names and path not in HISTORY} == {}


def test_a_line_is_read_by_the_present_names_whatever_it_holds():
    assert by_present_names({"reward/mean": 0.5, "mine": None}) == {"critic/score/mean": 0.5, "mine": None}
    lengths = {"response/length_mean": 20.0, "response/tool_tokens_mean": 5.0}
    assert by_present_names(lengths) == {"response_length/mean": 25.0, "response/tool_tokens_mean": 5.0}
    assert by_present_names({"response/length_mean": 20.0}) == {"response_length/mean": 20.0}
    odd = {"response/length_mean": None, "response/tool_tokens_mean": "many"}
    assert by_present_names(odd) == {"response_length/mean": None, "response/tool_tokens_mean": "many"}
    assert set(RENAMED.values()).isdisjoint(RENAMED)
