"""The matrix of docs/follow-other-engines.md on real SGLang: what the follower says is what transformers says."""

import pytest
from support.engine_matrix import (
    BF16,
    Row,
    Watched,
    check_adapters,
    check_neighbours,
    check_row,
    running,
    sglang_answer,
)
from support.engine_models import model_of, write_start
from support.engine_process import python_of
from support.sglang_process import LORA, sglang

from explorer_hooks.hook import HookOptions
from explorer_hooks.hooks.sglang import SGLangHook
from explorer_hooks.hooks.sglang_lora import SGLangLoraHook
from explorer_hooks.proof import parameter_check as checksums

PYTHON = python_of("SYNCD_SGLANG_PYTHON", ".venv-sglang/bin/python")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

TWO = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
ROWS = [
    Row("Qwen2, untied"),
    Row("Qwen3, tied"),
    Row("Qwen3-MoE", may_fail=True),
    Row("Llama, untied"),
    Row("Llama, untied", ("--dtype", "bfloat16"), close=BF16),
    Row("Qwen2, untied", ("--tp", "2"), TWO, may_fail=True),
    Row("Qwen2, untied", ("--dp", "2"), TWO, replicas=2, may_fail=True),
]


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_the_follower_says_of_each_load_what_transformers_says(tmp_path, row, record_line, monkeypatch):
    monkeypatch.setattr(checksums, "SHARE", 0.0)  # on a busy machine they take long
    start = write_start(tmp_path / "start", row.model)
    with running(sglang(PYTHON, start, tmp_path / "log", *row.flags, **row.env), row) as engine:
        hook = SGLangHook.from_options(HookOptions(engine.address, timeout=120))
        answers = lambda replica: sglang_answer(engine.address, replica)  # noqa: E731
        record = lambda line: record_line(f"SGLang, {line}")  # noqa: E731
        with Watched(tmp_path, hook, model_of(row.model, 0), answers, row.replicas) as watched:
            check_row(watched, row, record)
            if row.close < BF16:
                check_neighbours(watched, row, record, finds=True)


ADAPTERS = [Row("Llama, untied"), Row("Llama, untied", ("--dtype", "bfloat16"), close=BF16)]


@pytest.mark.parametrize("row", ADAPTERS, ids=[f"LoRA, {row.name}" for row in ADAPTERS])
def test_an_adapter_is_proven_under_its_own_name(tmp_path, row, record_line):
    start = write_start(tmp_path / "start", row.model)
    with running(sglang(PYTHON, start, tmp_path / "log", *LORA, *row.flags), row) as engine:
        hook = SGLangLoraHook.from_options(HookOptions(engine.address, timeout=120))
        asking = {}
        answers = lambda _: sglang_answer(engine.address, **asking)  # noqa: E731
        record = lambda line: record_line(f"SGLang, LoRA, {line}")  # noqa: E731
        with Watched(tmp_path, hook, model_of(row.model, 0), answers) as watched:
            check_adapters(watched, row, lambda name: asking.update(lora_path=name), record)
