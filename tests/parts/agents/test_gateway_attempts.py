"""Later attempts at a rollout, what they take of those before, and how dropped groups are counted, over restarts."""

import asyncio
import dataclasses
import json
import shutil

import pytest
from support.gateway_bed import GatewayBed, ScriptedEngine

from explorer_hooks.hook import PendingProof, Unproven
from explorer_hooks.parts.agents.journal import NAME
from explorer_hooks.parts.agents.records import encoded
from explorer_hooks.parts.agents.rows import experiences_of
from explorer_hooks.run.token_versions import TokenVersions

HELLO = [{"role": "user", "content": "hello"}]


def numbered():
    """Return an engine whose n-th answer is the letter n."""
    count = iter(range(1000))
    engine = ScriptedEngine(None)
    engine.say = lambda prompt: [40 + next(count), 0]
    return engine


async def go_on(bed, session, history, *texts):
    """Take a turn after each text, and return the answers and the history."""
    said = []
    for text in texts:
        one, history = await bed.ask(session, [*history, {"role": "user", "content": text}])
        said.append(one["content"])
    return said, history


@pytest.mark.fault("rollouts that are interrupted are drawn again until a short one survives")
def test_a_later_attempt_gets_the_answers_that_were_drawn_and_goes_on_behind_them_also_after_a_kill(tmp_path):
    """Three attempts, the last one in another process: each prompt of the rollout has one answer."""
    bed = GatewayBed(tmp_path / "first", numbered(), group_size=1)

    async def begin(bed):
        first = await bed.session()
        said, _ = await go_on(bed, first, [], "a", "b", "c")
        second = await bed.session(attempt=1)
        again, _ = await go_on(bed, second, [], "a")
        assert again == said[:1], "the second attempt ends behind its first turn"
        other, _ = await go_on(bed, await bed.session("other"), [], "a")
        assert other != again, "another rollout has draws of its own"
        return said

    said = bed.run(begin)
    assert len(bed.engine.prompts) == 4
    shutil.copytree(tmp_path / "first", tmp_path / "second")

    async def end(bed):
        third = await bed.session(attempt=2)
        again, history = await go_on(bed, third, [], "a", "b", "c")
        assert again == said
        assert bed.engine.prompts == []
        await go_on(bed, third, history, "d")
        await go_on(bed, third, [], "a")  # the same request once more is a branch, which was not drawn before
        assert len(bed.engine.prompts) == 2
        await bed.gateway.reward(third, {"reward": 1.0})
        return experiences_of(bed.sessions.groups["g"], "g", 1.0)

    resumed = GatewayBed(tmp_path / "second", numbered(), group_size=1)
    row, branch = resumed.run(end)
    first = bed.sessions.by_id
    assert (row.info["turns"], row.info["attempt"], branch.info["turns"]) == (4, 2, 1)
    learnt = [
        token for token, own in zip(row.tokens[row.prompt_length :], row.action_mask, strict=True) if own
    ]
    assert learnt == [40, 0, 41, 0, 42, 0, 40, 0]
    again = GatewayBed(tmp_path / "second", numbered(), group_size=1)
    again.close()
    assert experiences_of(again.sessions.groups["g"], "g", 1.0) == [row, branch]
    assert first.keys() == {
        one.id for group in bed.sessions.groups.values() for one in group.rollouts.values()
    }


def test_what_was_drawn_is_not_given_for_another_limit_of_tokens_or_twice(tmp_path):
    bed = GatewayBed(tmp_path, ScriptedEngine(lambda prompt: [40, 41, 42, 0]), group_size=1)

    async def main(bed):
        first = await bed.session()
        await bed.ask(first, HELLO, max_tokens=2)
        await bed.ask(first, HELLO)
        second = await bed.session(attempt=1)
        await bed.ask(second, HELLO, max_tokens=3)
        assert len(bed.engine.prompts) == 3, (
            "cut at 2, or ended by itself at 4: neither is an answer with 3 at most"
        )
        both = await asyncio.gather(
            bed.ask(second, HELLO, max_tokens=2), bed.ask(second, HELLO, max_tokens=2)
        )
        assert len(bed.engine.prompts) == 4, "one of two requests at once"
        assert [said["content"] for said, _ in both] == [bed.tokenizer.decode([40, 41])] * 2
        await bed.ask(second, HELLO)
        assert len(bed.engine.prompts) == 4

    bed.run(main)


def test_an_answer_that_was_cut_by_the_models_positions_is_not_drawn_again(tmp_path):
    """It has fewer tokens than it might have had. A limit below its length is another one, and so is cut anew."""
    bed = GatewayBed(tmp_path / "new", numbered(), group_size=1)
    count = iter(range(1000))
    bed.engine.say = lambda prompt: [40 + next(count)] * 3

    async def main(bed):
        said = [(await bed.ask(await bed.session(attempt=attempt), HELLO))[0] for attempt in range(3)]
        assert said[0] == said[1] == said[2]
        assert len(bed.engine.prompts) == 1, "drawn once"
        last = await bed.session(attempt=3)
        await bed.ask(last, HELLO, max_tokens=2)
        assert len(bed.engine.prompts) == 2, "cut at 2"
        await bed.ask(last, HELLO, max_tokens=3)
        assert len(bed.engine.prompts) == 2
        return last

    last = bed.run(main)
    lines = (tmp_path / "new" / NAME).read_text().splitlines()
    old = [
        json.dumps({key: value for key, value in json.loads(line).items() if key != "most"}) for line in lines
    ]
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / NAME).write_text("".join(f"{line}\n" for line in old))
    again = GatewayBed(tmp_path / "old", numbered(), group_size=1)
    again.close()
    assert [len(turn.tokens) for turn in again.sessions.by_id[last].turns] == [2, 3]


def test_what_was_drawn_is_not_given_for_another_prompt_of_the_same_length(tmp_path):
    bed = GatewayBed(tmp_path, numbered(), group_size=1)

    async def main(bed):
        said = [
            (await go_on(bed, await bed.session(attempt=attempt), [], text))[0]
            for attempt, text in enumerate(("x", "y", "x"))
        ]
        first, other = bed.engine.prompts
        assert len(first) == len(other)
        assert said[0] == said[2] != said[1]

    bed.run(main)


def test_each_dropped_group_is_reported_once_however_often_the_gateway_is_killed(tmp_path):
    """By hand: two dropped, killed twice, a batch that reports them, killed, one more dropped."""

    def restarted(main):
        bed = GatewayBed(tmp_path, numbered(), group_size=1)
        return bed.run(main)

    async def drop_two(bed):
        for name in ("a", "b"):
            await bed.session(name)
            await bed.gateway.drop(name, "agent")

    async def nothing(bed):
        return dict(bed.sessions.dropped), bed.gateway.dropped()

    async def write_one(bed):
        session = await bed.session("c")
        await bed.ask(session, HELLO)
        await bed.gateway.reward(session, {"reward": 1.0})
        await bed.gateway.begin_batch(1, ["c"])
        return (await bed.gateway.end_batch(["c"]))["dropped"]

    async def drop_one(bed):
        await bed.session("d")
        await bed.gateway.drop("d", "idle")
        return await nothing(bed)

    restarted(drop_two)
    assert restarted(nothing) == restarted(nothing) == ({"agent": 2}, {"agent": 2})
    assert restarted(write_one) == {"agent": 2}
    assert restarted(nothing) == ({}, {"agent": 2})
    assert restarted(drop_one) == ({"idle": 1}, {"agent": 2, "idle": 1})


def test_names_of_old_groups_are_forgotten_and_their_count_is_not(tmp_path, monkeypatch):
    """A run of weeks ends millions of groups; what is kept of them is bounded, in the process and in its journal."""
    monkeypatch.setattr("explorer_hooks.parts.agents.sessions.MOST_OVER", 3)

    async def drop(bed):
        first = len(bed.sessions.over)
        for number in range(5):
            name = f"{first}.{number}"
            await bed.session(name)
            await bed.gateway.drop(name, "agent" if number % 2 else "idle")
        return bed.gateway.dropped()

    assert GatewayBed(tmp_path, numbered(), group_size=1).run(drop) == {"idle": 3, "agent": 2}
    bed = GatewayBed(tmp_path, numbered(), group_size=1)
    assert bed.run(drop) == {"idle": 6, "agent": 4}
    assert list(bed.sessions.over) == ["3.2", "3.3", "3.4"]
    assert (tmp_path / NAME).read_text().splitlines()[0].count('"0.') == 3, "rewritten at the start"
    again = GatewayBed(tmp_path, numbered(), group_size=1)
    again.close()
    assert again.gateway.dropped() == {"idle": 6, "agent": 4}
    assert again.sessions.dropped == {"idle": 6, "agent": 4}, "none of them is reported yet"


def test_records_behind_the_end_of_their_session_say_nothing(tmp_path):
    """A journal that is rewritten while a turn, its reward and the end of its group wait to be written."""
    bed = GatewayBed(tmp_path, numbered(), group_size=1)

    async def main(bed):
        session = await bed.session()
        await bed.ask(session, HELLO)
        await bed.gateway.reward(session, {"reward": 1.0})
        await bed.gateway.drop("g", "driver")

    bed.run(main)
    lines = (tmp_path / NAME).read_bytes().splitlines(keepends=True)
    over = bed.sessions.rest()
    bed.sessions.apply({"kind": "turn", "session": next(iter(over["ended"]))})
    late = [line for line in lines if b'"kind":"over"' not in line and b'"kind":"session"' not in line]
    rest = encoded({"kind": "over", "groups": {"g": "driver"}, "ended": {}, "dropped": {"driver": 1}})
    (tmp_path / NAME).write_bytes(rest + b"".join(late))
    again = GatewayBed(tmp_path, numbered(), group_size=1)
    again.close()
    assert (again.sessions.over, again.sessions.dropped) == ({"g": "driver"}, {"driver": 1})


@pytest.mark.parametrize(
    ("then", "masked"),
    [({}, False), ({"1.0": Unproven(1)}, True), ({"1.0": Unproven(pending=True)}, True)],
    ids=["passes", "fails", "does not come"],
)
def test_what_is_doubted_is_decided_when_the_group_is_written_also_for_answers_that_were_drawn_before(
    tmp_path, then, masked
):
    """The first turn ended while a probe was pending; the second attempt gets its answer."""
    bed = GatewayBed(tmp_path / "state", numbered(), group_size=1)
    generate, pending = bed.engine.generate, PendingProof("1.0", 0)

    def doubtful(requests):
        for result in generate(requests):
            (one,) = result.responses
            versions = TokenVersions(one.versions.spans, [True] * len(one.tokens), pending)
            yield dataclasses.replace(result, responses=(dataclasses.replace(one, versions=versions),))

    bed.engine.generate = doubtful

    async def main(bed):
        await go_on(bed, await bed.session(), [], "a")
        bed.engine.generate = generate
        second = await bed.session(attempt=1)
        await go_on(bed, second, [], "a", "b")
        await bed.gateway.reward(second, {"reward": 1.0})
        (group,) = await bed.gateway.whole_groups(1, 1, then)
        (row,) = experiences_of(group, "g", 1.0)
        return row

    row = bed.run(main)
    assert len(bed.engine.prompts) == 2
    doubted = [
        token for token, bit in zip(row.tokens[row.prompt_length :], row.unproven or (), strict=False) if bit
    ]
    assert doubted == ([40, 0] if masked else [])
    assert (row.unproven is None) != masked
