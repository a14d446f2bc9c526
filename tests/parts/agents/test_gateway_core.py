"""The gateway over a scripted engine: exact tokens, branches, retries, attempts, its journal and what it refuses."""

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chat_model import make_tokenizer
from support.experiences import fifo, write
from support.gateway_bed import TOKEN, TOOL, GatewayBed, ScriptedEngine
from support.jobs import ManualClock
from support.paths import ROOT
from support.served_process import MINUTES

from explorer_hooks.parts.agents.api_errors import ApiError
from explorer_hooks.parts.agents.chat import read_request
from explorer_hooks.parts.agents.journal import NAME
from explorer_hooks.parts.agents.rows import experiences_of
from explorer_hooks.parts.agents.run_record import GatewayRun, PlayedTasks
from explorer_hooks.parts.agents.service import GatewayParts, GatewayService, GroupDemand
from explorer_hooks.run import pacing
from explorer_hooks.run.own_files import METRICS, Records
from syncd.errors import EngineDeadError, StorageError, TimedOutError, UsageError
from syncd.experience import batch_paths, table
from syncd.experience.table import decode_batch
from syncd.experience.writer import ExperienceWriter
from syncd.protocol.layout import Job
from syncd.protocol.version import label_of

HELLO = [{"role": "user", "content": "hello"}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1,  "b": [2]}}</tool_call>'


def then(text, role="user", **more):
    return {"role": role, "content": text, **more}


def numbered():
    """Return an engine whose answers differ by a letter, all in tokens of one letter: text is not cut into these."""
    count, letters = iter(range(1000)), make_tokenizer().convert_tokens_to_ids
    return ScriptedEngine(lambda prompt: [*letters(list("thecall")), letters(chr(65 + next(count) % 26)), 0])


def rows(bed, group="g"):
    return experiences_of(bed.sessions.groups[group], group, 1.0)


@pytest.mark.fault("the separator behind each turn is lost")
def test_a_second_turn_continues_the_recorded_tokens_and_rows_have_them(tmp_path):
    """By hand: prompt, answer, what the template writes, answer; only answers are learnt, each by its own version."""
    steps = iter([3, 4])
    engine = ScriptedEngine(
        lambda prompt: [10, 11, 0] if len(prompt) < 12 else [12, 13], step=lambda: next(steps)
    )
    bed = GatewayBed(tmp_path, engine, group_size=1)

    async def main(bed):
        session = await bed.session()
        _, history = await bed.ask(session, HELLO)
        await bed.ask(session, [*history, then("go on")], temperature=0.1)
        await bed.gateway.reward(session, {"reward": 2, "info": {"why": "good"}})
        return rows(bed)

    (row,) = bed.run(main)
    first, between = (
        bed.ids("<|user|>hello<|end|>\n<|assistant|>"),
        bed.ids("\n<|user|>go on<|end|>\n<|assistant|>"),
    )
    assert engine.prompts == [first, [*first, 10, 11, 0, *between]]
    assert list(row.tokens) == [*first, 10, 11, 0, *between, 12, 13]
    assert row.prompt_length == len(first)
    gap = len(between)
    assert list(row.action_mask) == [True] * 3 + [False] * gap + [True] * 2
    assert list(row.logprobs) == pytest.approx([-0.51, -0.511, -0.5, *[0.0] * gap, -0.512, -0.513])
    assert row.spans == ((0, 1, 3), (3 + gap, 1, 4))
    assert (row.generation, row.step, row.reward, row.segment, row.segments) == (1, 3, 2.0, 0, 1)
    assert row.info == {"turns": 2, "attempt": 0, "score": {"why": "good"}, "truncated": True}


@pytest.mark.fault("turns that branches share are trained once a branch")
def test_branches_and_changed_histories_are_segments_and_shared_turns_are_learnt_once(tmp_path):
    bed = GatewayBed(tmp_path, numbered(), group_size=1)

    async def main(bed):
        session = await bed.session()
        _, one = await bed.ask(session, HELLO)
        await asyncio.gather(bed.ask(session, [*one, then("left")]), bed.ask(session, [*one, then("right")]))
        await bed.ask(session, [then("a summary"), then("go on")])
        await bed.gateway.reward(session, {"reward": 1.0})
        return rows(bed)

    found = bed.run(main)
    assert [(row.segment, row.segments) for row in found] == [(0, 3), (1, 3), (2, 3)]
    shared = found[0].tokens[: found[0].prompt_length + 9]
    assert found[1].tokens[: len(shared)] == shared
    assert [sum(row.action_mask) for row in found] == [18, 9, 9]
    assert list(found[1].action_mask[:9]) == [False] * 9, "the first row has learnt it"


def test_turns_have_rewards_of_their_own_in_the_row_that_learns_them(tmp_path):
    """By hand: answers of nine tokens; the second one begins behind what the template writes between the two."""
    bed = GatewayBed(tmp_path, numbered(), group_size=1)

    async def main(bed):
        session = await bed.session()
        _, one = await bed.ask(session, HELLO)
        left, _ = await bed.ask(session, [*one, then("left")])
        await bed.ask(session, [*one, then("right")])
        assert left["content"]
        names = [bed.sessions.by_id[session].answer_id(turn) for turn in bed.sessions.by_id[session].turns]
        for wrong, said in (
            ([1.0, 2.0], "turn_rewards has 2 rewards, and the session 3 turns"),
            ([1.0, 2.0, 3.0], "turn_rewards add up to 6 where the reward is 2"),
            ({names[0]: 1.0, "chatcmpl-x": 1.0}, "chatcmpl-x is no answer of the session"),
            ([1.0, "x", 1.0], "turn_rewards is no list of numbers"),
            ([1.0, float("nan"), 1.0], "turn_rewards is no list of numbers"),
            ("no", "turn_rewards is no list of numbers"),
        ):
            with pytest.raises(ApiError, match=said):
                await bed.gateway.reward(session, {"reward": 2, "turn_rewards": wrong})
        by_id = {names[2]: -0.5, names[0]: 2.5}
        await bed.gateway.reward(session, {"reward": 2, "turn_rewards": by_id})
        return rows(bed)

    found = bed.run(main)
    gap = len(bed.ids("\n<|user|>left<|end|>\n<|assistant|>"))
    assert [row.turn_rewards for row in found] == [((9, 2.5), (18 + gap, 0.0)), ((19 + gap, -0.5),)]
    again = GatewayBed(tmp_path, numbered(), group_size=1)
    again.close()
    assert [row.turn_rewards for row in rows(again)] == [row.turn_rewards for row in found], "replayed"


def test_the_last_segment_alone_is_trained_if_so_wished_and_its_turns_are_all_learnt_there(tmp_path):
    """By hand: a branch, then a summary: three segments; two turns are in the last one, and three are not."""
    bed = GatewayBed(tmp_path, numbered(), group_size=1, segments="last")

    async def main(bed):
        session = await bed.session()
        _, one = await bed.ask(session, HELLO)
        await bed.ask(session, [*one, then("left")])
        await bed.ask(session, [*one, then("right")])
        _, summed = await bed.ask(session, [then("a summary")])
        await bed.ask(session, [*summed, then("go on")])
        with pytest.raises(ApiError, match='segments = "last" trains one segment'):
            await bed.gateway.reward(session, {"reward": 1.0, "turn_rewards": [0, 0, 0, 0, 1.0]})
        await bed.gateway.reward(session, {"reward": 1.0, "info": {"why": "good"}})
        return [experiences_of(bed.sessions.groups["g"], "g", 1.0, choice) for choice in ("last", "all")]

    (row,), every = bed.run(main)
    assert (row.segment, row.segments, row.reward, row.turn_rewards) == (0, 1, 1.0, None)
    assert row.tokens == every[-1].tokens
    assert list(row.action_mask) == list(every[-1].action_mask), "its turns are in no other segment"
    assert sum(row.action_mask) == 18
    assert row.info == {
        "turns": 2,
        "attempt": 0,
        "score": {"why": "good"},
        "truncated": False,
        "untrained_turns": 3,
    }
    assert len(every) == 3
    assert all("untrained_turns" not in one.info for one in every)


def test_the_trainer_samples_a_group_of_the_gateway_whole_with_all_segments(tmp_path):
    bed = GatewayBed(tmp_path / "state", numbered())
    (tmp_path / "job").mkdir()
    job = Job.at(tmp_path / "job")

    async def main(bed):
        for rollout in range(2):
            session = await bed.session("g", rollout)
            _, history = await bed.ask(session, HELLO)
            for text in ("left", "right")[: 1 + rollout]:
                await bed.ask(session, [*history, then(text)])
            await bed.gateway.reward(session, {"reward": rollout})
        return rows(bed)

    write(job, "e0", bed.run(main))
    batch = fifo(job, ManualClock(), groups=1).sample(1, generation=1)
    assert [(one.rollout, one.segment) for one in batch.experiences] == [(0, 0), (1, 0), (1, 1)]
    assert (batch.rollouts, batch.groups) == ((0, 1, 1), (0, 0, 0))


def test_a_retry_gets_the_recorded_turn_and_the_same_request_without_being_one_is_a_branch(tmp_path):
    bed = GatewayBed(tmp_path, numbered(), group_size=1)

    async def main(bed):
        session = await bed.session()
        first, _ = await bed.ask(session, HELLO)
        again, _ = await bed.ask(session, HELLO, retry=True)
        assert first == again
        both = await asyncio.gather(*(bed.ask(session, [then("x")], retry=retry) for retry in (False, True)))
        assert both[0] == both[1], "a retry waits for the turn that is under way"
        assert len(bed.sessions.by_id[session].turns) == 2
        other, _ = await bed.ask(session, HELLO)
        assert other != first
        return len(bed.sessions.by_id[session].turns)

    assert bed.run(main) == 3


def test_sessions_are_idempotent_the_first_reward_counts_and_a_later_attempt_abandons(tmp_path):
    bed = GatewayBed(tmp_path, numbered(), groups=1)

    async def main(bed):
        gateway = bed.gateway
        first = await bed.session()
        assert await bed.session() == first
        with pytest.raises(ApiError, match="no turn") as error:
            await gateway.reward(first, {"reward": 1.0})
        assert error.value.status == 409
        await bed.ask(first, HELLO)
        second = await bed.session(attempt=1)
        assert gateway.session(first) == {"session": first, "state": "abandoned"}
        with pytest.raises(ApiError, match="abandoned") as error:
            await bed.ask(first, HELLO)
        assert error.value.status == 410
        with pytest.raises(ApiError, match="attempt 1 of the rollout is open"):
            await bed.session(attempt=0)
        with pytest.raises(ApiError, match="no further group") as error:
            await bed.session("other")
        assert (error.value.status, error.value.retry_after) == (429, 1)
        await bed.ask(second, HELLO)
        await gateway.reward(second, {"reward": 1.0})
        assert (await gateway.reward(second, {"reward": 5.0}))["reward"] == 1.0
        assert (await gateway.abandon(second))["state"] == "rewarded"
        with pytest.raises(ApiError, match="is rewarded"):
            await bed.session(attempt=2)
        with pytest.raises(ApiError, match="rewarded"):
            await bed.ask(second, HELLO)
        for wrong in (
            {"reward": 1e19},
            {"reward": 10**400},
            {"reward": 1, "info": {"x": float("nan")}},
            {"reward": 1, "info": {"x": "y" * 40_000}},
            None,
            {},
            {"reward": "1"},
            {"reward": True},
            {"reward": float("nan")},
            {"reward": 1, "x": 2},
        ):
            with pytest.raises(ApiError) as error:
                await gateway.reward(second, wrong)
            assert error.value.status == 400
        assert await gateway.whole_groups(1, 2, {}) == []
        await gateway.drop("g", "driver")
        with pytest.raises(ApiError, match="the group is over: driver"):
            await bed.session()
        with pytest.raises(ApiError, match="no such session") as error:
            await bed.ask("unknown", HELLO)
        assert error.value.status == 404
        assert bed.sessions.dropped == {"driver": 1}

    bed.run(main)


class WritingService:
    """A service over a gateway that is served, and what writes its batches into a job."""

    def __init__(self, bed, http, writer, groups, are_published=lambda _: True):
        reward = SimpleNamespace(most_equal=0, equal_groups="keep")
        explorer = SimpleNamespace(reward=reward, training_sets=())
        data = SimpleNamespace(group_size=1)
        file = SimpleNamespace(explorer_groups=groups, sync=None, explorer=explorer, data=data)
        client = SimpleNamespace(describe=lambda *_, **__: None)
        source = SimpleNamespace(unproven={}, are_published=are_published, client=client)
        versions = SimpleNamespace(room=lambda: 1)
        run = GatewayRun(writer, bed.journal, PlayedTasks())
        followed = SimpleNamespace(file=file, source=source)
        parts = followed, None, versions, GroupDemand(), writer, run, bed.gateway, http, lambda: False
        self.write = GatewayService(GatewayParts(*parts))._write


def test_a_group_that_a_driver_drops_while_its_batch_is_prepared_is_not_written(tmp_path):
    bed = GatewayBed(tmp_path / "state", numbered(), group_size=1)
    (tmp_path / "job").mkdir()
    with bed.serving() as (driver, http), ExperienceWriter(Job.at(str(tmp_path / "job")), "e0") as writer:

        def are_published(_versions):
            assert driver.post("/groups/g/drop")[1]["state"] == "driver"
            return True

        service = WritingService(bed, http, writer, 1, are_published)
        session = driver.session("g", 0)
        driver.post(f"/s/{session['session']}/v1/chat/completions", {"messages": HELLO})
        driver.reward(session, 1.0)
        assert service.write(1), "there was a group to look at"
        assert not service.write(1)
        assert (writer.upcoming, bed.sessions.over) == (1, {"g": "driver"})
        assert (bed.gateway.dropped(), bed.sessions.pending) == ({"driver": 1}, {})


def test_groups_that_make_a_batch_too_large_are_written_as_several_and_one_that_alone_does_is_dropped(
    tmp_path, monkeypatch
):
    """A batch has two rows at most, and each history that is no other's continuation is a row."""
    monkeypatch.setattr(table, "MAX_ROWS", 2)
    bed = GatewayBed(tmp_path / "state", numbered(), group_size=1)
    (tmp_path / "job").mkdir()
    with bed.serving() as (driver, http), ExperienceWriter(Job.at(str(tmp_path / "job")), "e0") as writer:
        service = WritingService(bed, http, writer, 4)
        for group, histories in (("a", 2), ("b", 1), ("c", 3), ("d", 1)):
            session = driver.session(group, 0)
            for number in range(histories):
                history = {"messages": [then(f"number {number}")]}
                driver.post(f"/s/{session['session']}/v1/chat/completions", history)
            driver.reward(session, 1.0)
        assert service.write(4)
        paths = [batch_paths.batch(writer.job, "e0", number) for number in range(1, writer.upcoming)]
        batches = [decode_batch(writer.job.disk.read(path, 1 << 20), path) for path in paths]
        names = [[row.group.rpartition("/")[2] for row in batch] for batch in batches]
        assert names == [["a", "a"], ["b"], ["d"]]
        assert pacing.written(writer.job) == writer.written == 1, (
            "other explorers count them as one batch too"
        )
        (line,) = Records.own(writer.job, "e0", METRICS).all()
        assert (line["batch"], line["rollouts"], line["segments"]) == (1, 3, 4)
        assert line["dropped"] == {"experience": 1}
        assert (bed.gateway.dropped(), bed.sessions.pending) == ({"experience": 1}, {})


def test_of_a_split_batch_what_was_not_written_before_a_kill_is_written_after_it(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "MAX_ROWS", 1)
    (tmp_path / "job").mkdir()
    job, write = Job.at(str(tmp_path / "job")), ExperienceWriter.write_encoded

    def killed_at_the_second(writer, data, **more):
        if writer.upcoming > 1:
            raise KeyboardInterrupt
        return write(writer, data, **more)

    monkeypatch.setattr(ExperienceWriter, "write_encoded", killed_at_the_second)
    bed = GatewayBed(tmp_path / "state", numbered(), group_size=1)
    with bed.serving() as (driver, http), ExperienceWriter(job, "e0") as writer:
        for group in ("a", "b"):
            session = driver.session(group, 0)
            driver.post(f"/s/{session['session']}/v1/chat/completions", {"messages": HELLO})
            driver.reward(session, 1.0)
        with pytest.raises(KeyboardInterrupt):
            WritingService(bed, http, writer, 2).write(2)
    monkeypatch.setattr(ExperienceWriter, "write_encoded", write)
    again = GatewayBed(tmp_path / "state", numbered(), group_size=1)
    with again.serving() as (_, http), ExperienceWriter(job, "e0") as writer:
        again.sessions.apply(again.sessions.settled(writer.upcoming))
        assert (again.sessions.over, list(again.sessions.groups)) == ({"a": "written"}, ["b"])
        assert WritingService(again, http, writer, 1).write(1)
        assert (writer.upcoming, again.sessions.over) == (3, {"a": "written", "b": "written"})


def test_unproven_tokens_that_two_segments_share_are_counted_once(tmp_path):
    bed = GatewayBed(tmp_path / "state", numbered(), group_size=1)
    (tmp_path / "job").mkdir()

    async def branched(bed):
        session = await bed.session("g")
        _, history = await bed.ask(session, HELLO)
        for text in ("left", "right"):
            await bed.ask(session, [*history, then(text)])
        (first, *_) = bed.sessions.by_id[session].turns
        first.unproven = [True] * len(first.tokens)
        await bed.gateway.reward(session, {"reward": 1.0})
        return len(first.tokens)

    with bed.serving() as (_, http), ExperienceWriter(Job.at(str(tmp_path / "job")), "e0") as writer:
        doubted = http.call(branched(bed))
        assert WritingService(bed, http, writer, 1).write(1)
        (line,) = Records.own(writer.job, "e0", METRICS).all()
    assert (line["segments"], line["unproven_tokens"]) == (2, doubted)


def test_a_rollout_is_counted_by_the_oldest_version_of_all_its_segments(tmp_path):
    steps = iter([3, 4, 5])
    engine = ScriptedEngine(lambda _: [10, 11, 0], step=lambda: next(steps))
    bed = GatewayBed(tmp_path / "state", engine, group_size=1)
    (tmp_path / "job").mkdir()

    async def branched(bed):
        session = await bed.session("g")
        _, history = await bed.ask(session, HELLO)
        for messages in ([then("anew")], [*history, then("on")]):
            await bed.ask(session, messages)
        await bed.gateway.reward(session, {"reward": 1.0})

    with bed.serving() as (_, http), ExperienceWriter(Job.at(str(tmp_path / "job")), "e0") as writer:
        http.call(branched(bed))
        assert [row.step for row in rows(bed)] == [4, 3]
        assert WritingService(bed, http, writer, 1).write(1)
        (line,) = Records.own(writer.job, "e0", METRICS).all()
    assert line["versions"] == {label_of((1, 3)): 1}


def test_idle_groups_are_dropped_and_turns_are_bounded(tmp_path):
    bed = GatewayBed(tmp_path, numbered(), group_size=1, idle=0.0, max_turns=1, max_prompt_tokens=30)

    async def main(bed):
        whole, idle = await bed.session("whole"), await bed.session("idle")
        _, history = await bed.ask(whole, HELLO)
        with pytest.raises(ApiError, match="its 1 turns"):
            await bed.ask(whole, [*history, then("on")])
        with pytest.raises(ApiError, match="the limit is 30") as error:
            await bed.ask(idle, [then("much " * 30)])
        assert error.value.code == "context_length_exceeded"
        await bed.gateway.reward(whole, {"reward": 0})
        await asyncio.sleep(0.01)
        await bed.gateway.drop_idle()
        assert set(bed.sessions.groups) == {"whole"}
        assert bed.sessions.over == {"idle": "idle"}

    bed.run(main)


@pytest.mark.fault("a dead engine becomes a bad reward")
def test_an_engine_that_is_away_is_waited_for_and_then_answered_with_503(tmp_path):
    away = iter([[], [], [7, 0]])
    bed = GatewayBed(tmp_path, ScriptedEngine(lambda prompt: next(away, [])), hold=1.0)

    async def main(bed):
        session = await bed.session()
        said, _ = await bed.ask(session, HELLO)
        with pytest.raises(ApiError, match="the engine is away: away") as error:
            await bed.ask(session, [then("x")])
        assert (error.value.status, error.value.document["error"]["type"]) == (503, "server_error")
        return said, len(bed.sessions.by_id[session].turns)

    assert bed.run(main)[1] == 1


def broken(_):
    raise RuntimeError("CUDA out of memory")


def test_an_engine_that_raises_is_dead_and_nobody_waits_for_it(tmp_path):
    """An error of torch is none of ours: it ends no thread, is the gateway's failure, and makes health say so."""
    bed = GatewayBed(tmp_path, ScriptedEngine(broken))

    async def main(bed):
        session = await bed.session()
        for text in ("one", "two"):
            with pytest.raises(ApiError, match="CUDA out of memory") as error:
                await asyncio.wait_for(bed.ask(session, [then(text)]), MINUTES)
            assert error.value.status == 503

    with bed.serving() as (driver, http):
        assert driver.get("/health")[0] == 200
        http.call(main(bed))
        status, told = driver.get("/health")
    assert (status, told["ready"], told["reason"]) == (503, False, str(bed.gateway.failure))
    failure = bed.gateway.failure
    assert isinstance(failure, EngineDeadError)
    assert "the engine failed: RuntimeError" in str(failure)
    assert failure.hint


def test_a_call_that_the_gateways_thread_does_not_end_is_an_error_with_a_code(tmp_path, monkeypatch):
    monkeypatch.setattr("explorer_hooks.parts.agents.http_thread._CALL", 0.05)
    bed = GatewayBed(tmp_path, numbered())

    async def broken():
        raise TimeoutError("its own")

    with bed.serving() as (_, http):
        with pytest.raises(TimedOutError, match=r"the gateway did nothing for 0\.05 s") as error:
            http.call(asyncio.Event().wait())
        assert (error.value.exit_code, bool(error.value.hint)) == (4, True)
        with pytest.raises(TimeoutError, match="its own"):
            http.call(broken())


def test_history_as_the_template_writes_it_continues_only_what_it_writes(tmp_path):
    """An answer in tokens that its text is not cut into begins a new segment, one in the usual tokens does not."""
    bed = GatewayBed(tmp_path / "a", numbered(), group_size=1, history="template")

    async def main(bed):
        session = await bed.session()
        _, history = await bed.ask(session, HELLO)
        await bed.ask(session, [*history, then("go on")])
        return len(bed.sessions.by_id[session].leaves)

    usual = bed.ids("co")
    assert bed.run(main) == 2
    bed = GatewayBed(tmp_path / "b", ScriptedEngine(lambda _: [*usual, 0]), group_size=1, history="template")
    assert bed.run(main) == 1


@pytest.mark.fault("reasoning that agents do not send back breaks the history")
def test_reasoning_that_is_not_sent_back_stays_in_the_tokens(tmp_path):
    bed = GatewayBed(tmp_path, ScriptedEngine(None), group_size=1, template="<think></think>")
    thought = [*bed.ids("<think>hm</think>four"), 0]
    bed.engine.say = lambda prompt: thought

    async def main(bed):
        session = await bed.session()
        said, _ = await bed.ask(session, HELLO)
        assert (said["reasoning_content"], said["content"]) == ("hm", "four")
        await bed.ask(session, [*HELLO, then("four", "assistant"), then("go on")])
        return len(bed.sessions.by_id[session].leaves)

    assert bed.run(main) == 1
    assert bed.engine.prompts[1][: len(bed.engine.prompts[0]) + len(thought)] == [
        *bed.engine.prompts[0],
        *thought,
    ]


async def _two_groups(bed):
    """Write one of two groups, the other is open with a turn."""
    for rollout in range(2):
        session = await bed.session("done", rollout)
        await bed.ask(session, HELLO)
        await bed.gateway.reward(session, {"reward": 1.0})
    waiting = await bed.session("open", 0)
    await bed.ask(waiting, HELLO)
    await bed.ask(await bed.session("open", 1), HELLO)
    await bed.session("open", 1, attempt=1)
    await bed.gateway.begin_batch(1, ["done"])
    return waiting


@pytest.mark.fault("a restarted gateway forgets its sessions")
def test_a_replayed_journal_is_what_was_recorded_at_each_line_also_if_the_last_one_is_torn(tmp_path):
    bed = GatewayBed(tmp_path / "live", numbered())
    waiting = bed.run(_two_groups)
    lines = (tmp_path / "live" / NAME).read_bytes().splitlines(keepends=True)
    for cut in range(len(lines) + 1):
        for torn in (b"", (lines[cut] if cut < len(lines) else lines[0])[:-7]):
            directory = tmp_path / f"cut-{cut}-{bool(torn)}"
            directory.mkdir()
            (directory / NAME).write_bytes(b"".join(lines[:cut]) + torn)
            again = GatewayBed(directory, numbered())
            again.close()
            assert (directory / NAME).read_bytes().endswith(b"\n")
    assert [row.tokens for row in rows(again, "done")] == [row.tokens for row in rows(bed, "done")]
    assert again.sessions.by_id[waiting].turns[0].tokens == bed.sessions.by_id[waiting].turns[0].tokens
    shutil.copytree(tmp_path / "live", tmp_path / "resumed")
    resumed = GatewayBed(tmp_path / "resumed", numbered())

    async def main(bed):
        said, history = await bed.ask(waiting, HELLO, retry=True)
        await bed.ask(waiting, [*history, then("go on")])
        return said, len(bed.sessions.by_id[waiting].leaves)

    said, leaves = resumed.run(main)
    assert said["content"] == bed.sessions.by_id[waiting].turns[0].answer.content
    assert leaves == 1, "the history goes on where the killed process was"


def test_a_journal_that_grows_is_rewritten_without_what_is_over_while_turns_are_recorded(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("explorer_hooks.parts.agents.journal._GROWN", 20_000)
    bed = GatewayBed(tmp_path, numbered(), group_size=1)

    async def group(name):
        session = await bed.session(name)
        history = HELLO
        for turn in range(3):
            _, history = await bed.ask(session, [*history, then(f"turn {turn}")] if turn else HELLO)
        await bed.gateway.reward(session, {"reward": 1.0})
        return session

    async def main(bed):
        await bed.ask(await bed.session("kept"), HELLO)
        for number in range(20):
            names = [f"{number}.{at}" for at in range(4)]
            await asyncio.gather(*map(group, names))
            await bed.gateway.begin_batch(number + 1, names)
            await bed.gateway.end_batch(names)

    bed.run(main)
    written = (tmp_path / NAME).read_text().count('"kind":"turn"')
    assert 1 < written < 80, "of 241 turns"
    again = GatewayBed(tmp_path, numbered(), group_size=1)
    again.close()
    assert set(again.sessions.groups) == {"kept"}
    assert list(again.sessions.over.values()) == ["written"] * 80
    assert again.sessions.ended.keys() == bed.sessions.ended.keys()


@pytest.mark.parametrize(("upcoming", "is_written"), [(1, False), (2, True)])
def test_a_batch_that_was_about_to_be_written_is_judged_by_its_number(tmp_path, upcoming, is_written):
    GatewayBed(tmp_path, numbered()).run(_two_groups)
    bed = GatewayBed(tmp_path, numbered())
    bed.sessions.apply(bed.sessions.settled(upcoming))
    bed.close()
    assert ("done" in bed.sessions.over) is is_written
    assert [group.name for group in bed.sessions.whole_groups(2)] == ([] if is_written else ["done"])


def test_a_second_process_is_refused(tmp_path):
    bed = GatewayBed(tmp_path, numbered())
    with pytest.raises(UsageError, match="another gateway"):
        GatewayBed(tmp_path, numbered())
    bed.run(_two_groups)
    path = tmp_path / NAME
    assert path.stat().st_mode & 0o777 == 0o600


def test_nothing_is_answered_once_the_journal_cannot_be_written(tmp_path, monkeypatch):
    bed = GatewayBed(tmp_path, numbered())

    def full(descriptor):
        raise OSError(28, "No space left on device")

    async def main(bed):
        session = await bed.session()
        monkeypatch.setattr("os.fsync", full)
        for _ in range(2):
            with pytest.raises(StorageError, match="No space left"):
                await bed.ask(session, HELLO)
            monkeypatch.undo()
        assert isinstance(bed.journal.failure, StorageError)

    bed.run(main)


WORDS = [
    *(
        "messages",
        "role",
        "content",
        "user",
        "assistant",
        "tool",
        "tool_calls",
        "function",
        "name",
        "arguments",
    ),
    *(
        "tools",
        "type",
        "text",
        "tool_choice",
        "auto",
        "none",
        "stream",
        "stream_options",
        "include_usage",
        "n",
    ),
    *(
        "max_tokens",
        "temperature",
        "stop",
        "logit_bias",
        "response_format",
        "chat_template_kwargs",
        "tokenize",
    ),
]
REFUSED = [
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    ({"messages": [{"role": []}]}, "messages"),
    ({"n": 2}, "n"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": {"x": 1}}, "stop"),
    ({"stop": "\ud800"}, None),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"guided_json": {}}, "guided_json"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user"}, {"role": "robot"}]}, "messages"),
    ({"messages": "x"}, "messages"),
]


@pytest.mark.parametrize(("more", "param"), REFUSED, ids=str)
def test_what_cannot_be_served_is_refused_by_name(more, param):
    with pytest.raises(ApiError) as error:
        read_request({"messages": HELLO, **more})
    assert (error.value.status, error.value.param) == (400, param)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.sampled_from(WORDS),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=5), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(WORDS), JSON) | JSON, st.lists(JSON, max_size=3))
def test_garbage_is_refused_and_never_an_error_of_the_gateway(body, messages):
    for one in (
        body,
        {"messages": messages},
        {**(body if isinstance(body, dict) else {}), "messages": HELLO},
    ):
        with contextlib.suppress(ApiError):
            read_request(one)


def test_histories_differ_by_their_tools_and_not_by_ids_and_spaces_of_calls():
    def key(name="f", number="1", arguments='{"x": 1}', tool="f", **more):
        call = {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
        answer = {"role": "assistant", "content": "so", "tool_calls": [call], **more}
        tools = [{"type": "function", "function": {"name": tool}}]
        result = {"role": "tool", "content": "2"}
        return read_request({"messages": [*HELLO, answer, result], "tools": tools}).key

    same = [key(), key(number="2"), key(arguments='{"x":1}'), key(reasoning="hm"), key(content=" so ")]
    assert len(set(same)) == 1
    others = [key(tool="g"), key(name="g"), key(arguments='{"x": 2}'), key(content="thus")]
    assert len({*same, *others}) == 5


@pytest.mark.parametrize("stream", [False, True])
def test_an_unmodified_client_calls_a_tool_over_two_turns(tmp_path, stream):
    """Ids of calls and spaces in arguments are not what the model wrote; its tokens are kept all the same."""
    bed = GatewayBed(tmp_path, ScriptedEngine(None), group_size=1, max_tokens=200)
    call, end = [*bed.ids(CALL), 0], [*bed.ids("three"), 0]

    tool = bed.tokenizer.convert_tokens_to_ids("<|tool|>")
    bed.engine.say = lambda prompt: end if tool in prompt else call

    with bed.serving() as (driver, _), contextlib.ExitStack() as opened:
        session = driver.session("g", 0)
        client = opened.enter_context(openai.OpenAI(base_url=session["base_url"], api_key="any"))
        history = list(HELLO)
        asked = {"model": "policy", "tools": [TOOL], "stream": stream}
        said = _said(client.chat.completions.create(messages=history, **asked), stream)
        (made,) = said["tool_calls"]
        assert (made["function"]["name"], json.loads(made["function"]["arguments"])) == (
            "add",
            {"a": 1, "b": [2]},
        )
        history += [said, {"role": "tool", "tool_call_id": made["id"], "content": "3"}]
        by_key = opened.enter_context(openai.OpenAI(base_url=f"{driver.url}/v1", api_key=session["api_key"]))
        assert _said(by_key.chat.completions.create(messages=history, **asked), stream)["content"] == "three"
        assert [model.id for model in client.models.list()] == ["policy"]
        with pytest.raises(openai.BadRequestError, match="open a session for each rollout"):
            client.chat.completions.create(messages=history, model="policy", n=2)
        driver.reward(session, 1.0)
        with pytest.raises(openai.APIStatusError, match="the session is rewarded"):
            client.chat.completions.create(messages=history, model="policy")
        (row,) = rows(bed)
        assert row.segments == 1
        (count, seconds) = row.info["tools"]["add"]
        assert (count, list(row.info["tools"])) == (1, ["add"])
        assert seconds > 0
        assert [
            token for token, own in zip(row.tokens[row.prompt_length :], row.action_mask, strict=True) if own
        ] == [
            *call,
            *end,
        ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_an_answer_whose_call_has_half_a_character_is_drawn_once_and_recorded(tmp_path, stream, path):
    bed = GatewayBed(tmp_path, ScriptedEngine(None), group_size=1, max_tokens=200)
    text = r'<tool_call>{"name": "add", "arguments": {"a": "\ud83d"}}</tool_call>'
    bed.engine.say = lambda _: [*bed.ids(text), 0]
    with bed.serving() as (driver, _), contextlib.ExitStack() as opened:
        session = driver.session("g", 0)
        client = opened.enter_context(openai.OpenAI(base_url=session["base_url"], api_key="any"))
        asked = {"model": "policy", "stream": stream}
        if path == "responses":
            tools = [{"type": "function", **TOOL["function"]}]
            reply = client.responses.create(input=HELLO, tools=tools, **asked)
            said = (list(reply)[-1].response if stream else reply).output_text
        else:
            reply = client.chat.completions.create(messages=HELLO, tools=[TOOL], **asked)
            said = _said(reply, stream)["content"]
        assert (said, len(bed.engine.prompts)) == (text, 1)
        driver.reward(session, 1.0)
        (row,) = rows(bed)
    assert row.info["turns"] == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reverse", [False, True], ids=["as called", "reversed"])
def test_an_answer_that_calls_two_tools_is_continued_by_both_results(tmp_path, stream, reverse):
    """One segment with the exact tokens, whichever result comes first; the time of each tool is that of both."""
    bed = GatewayBed(tmp_path, ScriptedEngine(None), group_size=1, max_tokens=200)
    calls = "".join(
        f'<tool_call>{{"name": "{name}",  "arguments": {{}}}}</tool_call>' for name in ("add", "find")
    )
    call, end = [*bed.ids(calls), 0], [*bed.ids("three"), 0]
    tool = bed.tokenizer.convert_tokens_to_ids("<|tool|>")
    bed.engine.say = lambda prompt: end if tool in prompt else call
    find = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}

    with bed.serving() as (driver, _), contextlib.ExitStack() as opened:
        session = driver.session("g", 0)
        client = opened.enter_context(openai.OpenAI(base_url=session["base_url"], api_key="any"))
        asked = {"model": "policy", "tools": [TOOL, find], "stream": stream}
        said = _said(client.chat.completions.create(messages=HELLO, **asked), stream)
        made = said["tool_calls"]
        assert [one["function"]["name"] for one in made] == ["add", "find"]
        assert len({one["id"] for one in made}) == 2
        results = [
            {"role": "tool", "tool_call_id": one["id"], "content": f"of {one['function']['name']}"}
            for one in (made[::-1] if reverse else made)
        ]
        done = client.chat.completions.create(messages=[*HELLO, said, *results], **asked)
        assert _said(done, stream)["content"] == "three"
        driver.reward(session, 1.0)
        (row,) = rows(bed)
    order = ("find", "add") if reverse else ("add", "find")
    between = bed.ids("\n" + "".join(f"<|tool|>of {name}<|end|>\n" for name in order) + "<|assistant|>")
    assert list(row.tokens[row.prompt_length :]) == [*call, *between, *end]
    assert list(row.action_mask) == [True] * len(call) + [False] * len(between) + [True] * len(end)
    assert (row.segments, row.info["turns"]) == (1, 2)
    assert {name: count for name, (count, _) in row.info["tools"].items()} == {"add": 1, "find": 1}


def _said(answer, stream):
    """Return the message of an answer, put together from the chunks of a stream as agents do."""
    if not stream:
        return answer.choices[0].message.model_dump(exclude_none=True)
    said = {"role": "assistant", "content": "", "tool_calls": []}
    for chunk in answer:
        delta = chunk.choices[0].delta if chunk.choices else None
        said["content"] += (delta and delta.content) or ""
        said["tool_calls"] += [
            one.model_dump(exclude={"index"}) for one in (delta and delta.tool_calls) or ()
        ]
    return {name: value for name, value in said.items() if value}


def test_the_example_of_a_driver_plays_groups_with_its_tool(tmp_path):
    bed = GatewayBed(tmp_path / "state", ScriptedEngine(None), max_tokens=200)
    call = [*bed.ids('<tool_call>{"name": "add", "arguments": {"numbers": [7, 8]}}</tool_call>'), 0]
    tool = bed.tokenizer.convert_tokens_to_ids("<|tool|>")
    bed.engine.say = lambda prompt: [*bed.ids("it is 15"), 0] if tool in prompt else call
    (tmp_path / "token").write_text(TOKEN)
    with bed.serving() as (driver, _):
        program = [sys.executable, ROOT / "examples" / "agents" / "driver.py", driver.url, tmp_path / "token"]
        done = subprocess.run([*program, "--groups", "2"], capture_output=True, text=True, check=True)
        assert done.stdout.count("'it is 15', reward ") == 4
        groups = list(bed.sessions.groups.values())
    assert [group.is_whole(2) for group in groups] == [True, True]
    assert {len(session.turns) for group in groups for session in group.rollouts.values()} == {2}


def test_drivers_need_the_token_and_every_bad_request_is_answered_in_json(tmp_path, monkeypatch):
    bed = GatewayBed(tmp_path, numbered())
    with bed.serving() as (driver, http):
        for path in ("/sessions", "/s/x/reward", "/s/x/abandon", "/groups/g/drop"):
            status, told = driver.post(path, token="wrong")
            assert (status, told["error"]["code"]) == (401, "unauthorised")
        for body in (
            {},
            {"group": "g", "task": "t", "rollout": 2},
            {"group": "g", "task": "t", "rollout": 0, "x": 1},
        ):
            assert driver.post("/sessions", body)[0] == 400
        assert driver.post("/nowhere")[0] == 404
        assert driver.post("/health")[0] == 405
        assert driver.post("/v1/chat/completions", {"messages": HELLO}, token="nobody")[0] == 401
        session = driver.session("g", 0)
        path = f"/s/{session['session']}/v1/chat/completions"
        assert driver.post(path, [1])[0] == 400
        surrogate = {
            "messages": [{"role": "user", "content": "\ud800"}],
            "chat_template_kwargs": {"bos_token": 5},
        }
        assert driver.post(path, surrogate)[0] == 400
        monkeypatch.setattr(bed.gateway, "turn", None)
        status, told = driver.post(path, {"messages": HELLO})
        assert (status, told["error"]["type"], told["error"]["code"]) == (500, "server_error", "bug")
        assert driver.post("/groups/g/drop")[1] == {"group": "g", "state": "driver"}
        assert http.url == driver.url
        assert driver.token == TOKEN
