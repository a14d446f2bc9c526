"""What the messages of `trainer import` and the pages of the four projects say is what the product does."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from explorer_hooks.tasks.sources import open_tasks
from syncd.jobfile.model import KEYS
from syncd.jobfile.task_sets import TaskSetSection
from trainer.parts.importing.table import PROJECTS, read_table

DOCS = Path(__file__).parents[3] / "docs"


def _page(name: str) -> str:
    return (DOCS / name).read_text()


def test_the_pages_function_scores_a_row_of_verl_as_verl_does(tmp_path: Path) -> None:
    row = {
        "prompt": [{"role": "user", "content": "48 and half of it?"}], "data_source": "openai/gsm8k",
        "reward_model": {"style": "rule", "ground_truth": "72"}, "extra_info": {"split": "train"},
    }  # fmt: skip
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")
    section = TaskSetSection(source=str(tmp_path / "train.parquet"))
    (task,) = open_tasks([section]).sets[0].tasks.all
    code = next(block for block in _blocks(_page("migrate.md")) if "default_compute_score" in block)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["score"]("48 + 24 = 72\n#### 72", task.info) == 1.0
    assert names["score"]("#### 71", task.info) == 0.0


def test_the_pages_function_gives_a_group_to_a_reward_of_trl() -> None:
    def accuracy(prompts: list[str], completions: list[str], solution: list[str], **_: Any) -> list[float]:
        assert prompts == ["1 + 1?", "1 + 1?"]
        return [float(one == true) for one, true in zip(completions, solution, strict=True)]

    code = next(block for block in _blocks(_page("migrate.md")) if "from my_rewards" in block)
    names: dict[str, Any] = {"accuracy": accuracy}
    exec(re.sub(r"from my_rewards .*", "", code), names)
    assert names["score"](["2", "3"], {"prompt": "1 + 1?", "solution": "2"}) == [1.0, 0.0]


def _blocks(page: str) -> Iterator[str]:
    """Yield the page's indented blocks."""
    for block in re.findall(r"(?:^(?: {4}.*)?\n)+", page, re.MULTILINE):
        if block.strip():
            yield "\n".join(line[4:] for line in block.splitlines())


STALE = re.compile(
    r"own explorer|explorer of your own|(?:start(?:ed)?|that you start|servers? [^.|]*) apart\b|sampled again"
    r"|JSONL only|tasks are JSONL|pandas|take one response\b(?! or)|no (?:tools|agents|environments)\b",
    re.IGNORECASE,
)
"""What the product does itself now: agents, servers by a command, dynamic sampling, Parquet, rewards of groups."""


def _sentences() -> Iterator[tuple[str, str]]:
    for name in ("migrate.md", "import-keys.md"):
        yield name, _page(name)
    for path in sorted((DOCS.parent / "trainer/parts/importing").glob("*.[pt]*")):
        yield path.name, path.read_text()


@pytest.mark.parametrize(
    "text",
    [
        "tools need your own explorer", "a server that you start apart", "Servers are started apart",
        "Tasks are JSONL with",
        "groups are never sampled again", "they run in explorers, and take one response (",
    ],
)  # fmt: skip
def test_the_search_for_stale_sentences_finds_those_that_there_were(text: str) -> None:
    assert STALE.search(text)


@pytest.mark.parametrize(
    ("name", "text"), list(_sentences()), ids=lambda value: value if len(value) < 30 else ""
)
def test_no_page_or_message_denies_what_the_product_does(name: str, text: str) -> None:
    found = STALE.search(text)
    assert found is None, f"{name}: {found and found[0]}"


def test_every_key_and_page_that_a_message_names_is_there() -> None:
    known = set(KEYS.all)
    sections = {key.rpartition(".")[0] for key in known} | {"explorer.task_sets"}
    for table in map(read_table, PROJECTS):
        for row in table.rows:
            said = f"{row.about} {row.instead}"
            for key in re.findall(r"\bexplorer(?:\.[a-z_]+)+", said):
                assert key in known or key in sections, (table.name, key)
            for page, anchor in re.findall(r"docs/([\w-]+\.md)(?:#([\w-]+))?", said):
                assert anchor in {"", *_anchors(_page(page))}, (table.name, page, anchor)


def _anchors(page: str) -> Iterator[str]:
    for heading in re.findall(r"^#+ (.+)$", page, re.MULTILINE):
        yield re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-")
