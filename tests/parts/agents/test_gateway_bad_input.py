"""What agents and drivers must not send, over HTTP: each gets a clear error, is counted, and disturbs nobody."""

import contextlib
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.gateway_bed import TOOL, GatewayBed, ScriptedEngine

from explorer_hooks.parts.agents.app import MOST_BODY
from explorer_hooks.parts.agents.rows import experiences_of

HELLO = [{"role": "user", "content": "hello"}]
LONG = 60.0
CHARACTERS = 20_000


def call(*messages, **more):
    return json.dumps({"messages": [*HELLO, *messages], **more}).encode()


def nested(depth, opening=b"[", closing=b"]"):
    return b'{"messages": ' + opening * depth + closing * depth + b"}"


def nested_tools(depth):
    """Return a tool with so many objects in each other, which a chat template writes as JSON."""
    inner = {}
    for _ in range(depth):
        inner = {"properties": inner}
    return call(tools=[{**TOOL, "function": {"name": "add", "parameters": inner}}])


def assistant(calls):
    return call({"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": "3"})


BODIES = {
    "no JSON": (b"hello", 400, "invalid_body"),
    "half of JSON": (call()[:-5], 400, "invalid_body"),
    "nothing": (b"", 400, "invalid_body"),
    "no UTF-8": (b'{"messages": "\xff\xfe"}', 400, "invalid_body"),
    "half a character": (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "invalid_body"),
    "a list": (b"[]", 400, "invalid_body"),
    "a hundred thousand lists in each other": (nested(100_000), 400, "invalid_body"),
    "hundreds of lists in each other": (nested(500), 400, "unsupported"),
    "hundreds of objects in each other": (
        nested(500, b'{"a":', b"}").replace(b":}", b":1}"),
        400,
        "unsupported",
    ),
    "tools in each other": (nested_tools(900), 400, "context_length_exceeded"),
    "another role": (call({"role": "robot", "content": "x"}), 400, "unsupported"),
    "a role that is a list": (call({"role": ["user"], "content": "x"}), 400, "unsupported"),
    "no messages": (b'{"messages": []}', 400, "unsupported"),
    "an answer in the last place": (call({"role": "assistant", "content": "x"}), 400, "unsupported"),
    "an image": (call({"role": "user", "content": [{"type": "image_url"}]}), 400, "unsupported"),
    "calls that are text": (assistant("add"), 400, "unsupported"),
    "a call that is a number": (assistant([1]), 400, "unsupported"),
    "a call without a name": (assistant([{"function": {"arguments": "{}"}}]), 400, "unsupported"),
    "a tool without a function": (call(tools=[{"type": "function"}]), 400, "unsupported"),
    "a tool of a provider": (call(tools=[{"type": "web_search"}]), 400, "unsupported"),
    "a forced tool": (call(tools=[TOOL], tool_choice="required"), 400, "unsupported"),
    "a number of tokens that is none": (call(max_tokens="many"), 400, "unsupported"),
    "no tokens": (call(max_tokens=0), 400, "unsupported"),
    "several answers": (call(n=3), 400, "unsupported"),
    "a variable that the gateway sets": (call(chat_template_kwargs={"tokenize": True}), 400, "unsupported"),
    "a prompt that is too long": (
        call({"role": "user", "content": "x y " * 1500}),
        400,
        "context_length_exceeded",
    ),
    "megabytes of a prompt": (
        call({"role": "user", "content": "x y " * (1 << 20)}),
        400,
        "context_length_exceeded",
    ),
    "a body that is too long": (b"[" + b" " * MOST_BODY + b"]", 413, "too_large"),
}
"""A request of an agent, and how it is answered."""

REWARDS = {
    "text": ({"reward": "good"}, 400),
    "none": ({}, 400),
    "not a number": ({"reward": float("nan")}, 400),
    "infinite": ({"reward": float("inf")}, 400),
    "huge": ({"reward": 10**400}, 400),
    "a truth": ({"reward": True}, 400),
    "a list": ({"reward": [1.0]}, 400),
    "another field": ({"reward": 1.0, "rewards": 2.0}, 400),
    "info that is text": ({"reward": 1.0, "info": "x"}, 400),
    "info that is too long": ({"reward": 1.0, "info": {"x": "y" * 100_000}}, 400),
    "rewards of turns that are text": ({"reward": 1.0, "turn_rewards": ["x"]}, 400),
    "rewards of other turns": ({"reward": 1.0, "turn_rewards": [0.5, 0.5]}, 400),
}
"""A reward of a driver, and how it is answered."""


class Served:
    """A gateway over HTTP with a session of which bad things are asked."""

    def __init__(self, bed, driver, http):
        self.bed, self.driver = bed, driver
        self.host = http.url.removeprefix("http://")
        host, _, port = self.host.partition(":")
        self.address = (host, int(port))
        self.open("bad")

    def open(self, group):
        self.session = self.driver.session(group, 0)

    def post(self, body, path=None, **headers):
        """Return status and code of the answer to a body, 0 if there is none."""
        path = path or f"/s/{self.session['session']}/v1/chat/completions"
        lines = [
            f"POST {path} HTTP/1.1",
            f"Host: {self.host}",
            f"Content-Length: {len(body)}",
            "Connection: close",
        ]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        status, said = self.raw("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        return status, (said or {}).get("error", {}).get("code")

    def raw(self, data):
        """Send bytes, and return status and document of what comes back."""
        with socket.create_connection(self.address, LONG) as connection:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(data)
            reply = b""
            with contextlib.suppress(ConnectionResetError):
                while piece := connection.recv(1 << 16):
                    reply += piece
        head, _, body = reply.partition(b"\r\n\r\n")
        try:
            return int(head.split()[1]), json.loads(body)
        except (IndexError, ValueError):
            return (int(head.split()[1]) if head else 0), None

    def play(self, group):
        """Play a rollout of two turns as a good agent does, and return its rows."""
        session = self.driver.session(group, 0)
        path = f"/s/{session['session']}/v1/chat/completions"
        history = list(HELLO)
        for text in ("go on", "and on"):
            status, said = self.driver.post(path, {"messages": history})
            assert status == 200, said
            history += [said["choices"][0]["message"], {"role": "user", "content": text}]
        self.driver.reward(session, 1.0)
        return experiences_of(self.bed.sessions.groups[group], group, 1.0)


@pytest.fixture
def served(tmp_path):
    bed = GatewayBed(
        tmp_path, ScriptedEngine(lambda prompt: [40, 41, 0]), group_size=1, max_turns=8, characters=CHARACTERS
    )
    with bed.serving() as (driver, http):
        yield Served(bed, driver, http)


def test_each_bad_request_of_an_agent_has_its_error_is_counted_and_disturbs_nobody(served):
    counted = {}
    with ThreadPoolExecutor(2) as pool:
        for number, (name, (body, status, code)) in enumerate(BODIES.items()):
            good = pool.submit(served.play, f"good-{number}")
            assert served.post(body) == (status, code), name
            counted[code] = counted.get(code, 0) + 1
            (row,) = good.result(LONG)
            assert (row.info["turns"], row.segments) == (2, 1), name
    assert served.bed.gateway.refused == counted
    assert served.bed.sessions.by_id[served.session["session"]].turns == []
    assert served.post(call())[0] == 200, "the session is as it was"


def test_sessions_that_are_not_the_agents_own_are_refused_before_the_body_is_read(served):
    done, other = served.driver.session("done", 0), served.driver.session("other", 0)
    path = "/s/{}/v1/chat/completions"
    assert served.post(call(), path.format(done["session"]))[0] == 200
    served.driver.reward(done, 1.0)
    served.driver.session("other", 0, attempt=1)
    served.driver.post("/groups/bad/drop")
    huge = b"x" * MOST_BODY
    reused = {
        "its own, which is rewarded": (done["session"], 410, "session_over"),
        "that of an attempt before": (other["session"], 410, "session_over"),
        "of a dropped group": (served.session["session"], 410, "session_over"),
        "forged": ("0" * 32, 404, "not_found"),
        "the beginning of one": (done["session"][:-1], 404, "not_found"),
        "of strange characters": ("%00%ff%2e%2e", 404, "not_found"),
    }
    for name, (session, status, code) in reused.items():
        for body in (call(), huge):
            assert served.post(body, path.format(session)) == (status, code), name
    for header in (
        {"Authorization": "Bearer nobody"},
        {"Authorization": "Basic x"},
        {"X_Session_ID": "no"},
        {},
    ):
        for body in (call(), huge):
            assert served.post(body, "/v1/chat/completions", **header) == (401, "invalid_api_key")
    for verb in ("reward", "abandon"):
        assert (
            served.post(b'{"reward": 1.0}', f"/s/{done['session']}/{verb}", Authorization="Bearer x")[0]
            == 401
        )
    assert len(served.bed.sessions.groups["done"].rollouts[0].turns) == 1
    served.play("good")


def test_each_bad_reward_has_its_error_and_the_session_stays_open_for_a_good_one(served):
    assert served.post(call())[0] == 200
    for name, (body, status) in REWARDS.items():
        path = f"/s/{served.session['session']}/reward"
        assert served.driver.post(path, body)[0] == status, name
    for body in (b"{", b"[1]", b"\xff"):
        assert served.post(body, path, Authorization="Bearer secret")[0] == 400
    assert served.bed.gateway.session(served.session["session"])["state"] == "open"
    assert served.driver.reward(served.session, 0.5)["reward"] == 0.5


def test_an_agent_that_floods_is_held_back_and_gets_no_more_turns_than_it_may_have(served):
    """A thousand requests at once by 50 connections: eight turns, and errors that clients understand."""
    free = threading.Event()
    say = served.bed.engine.say
    served.bed.engine.say = lambda prompt: say(prompt) if free.wait(LONG) else []
    with ThreadPoolExecutor(50) as pool:
        found = [pool.submit(served.post, call()) for _ in range(1000)]
        while served.bed.gateway.refused["too_many_requests"] < 500:
            assert not any(one.done() and one.exception() for one in found)
        free.set()
        answers = [one.result(LONG) for one in found]
    assert answers.count((200, None)) == 8
    assert set(answers) <= {(200, None), (400, "max_turns"), (429, "too_many_requests")}
    assert len(served.bed.sessions.by_id[served.session["session"]].turns) == 8
    served.play("good")


def test_agents_that_hang_in_the_middle_of_a_request_or_of_an_answer_disturb_nobody(served):
    """Connections that say nothing, half a head, half a body, an endless body; and answers that nobody reads."""
    path = f"/s/{served.session['session']}/v1/chat/completions"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\n".encode()
    stream = call(stream=True)
    whole = head + f"Content-Length: {len(stream)}\r\n\r\n".encode() + stream
    hung = [b"", head[:-10], head + b"Content-Length: 1000\r\n\r\n{", b"\x16\x03\x01 no HTTP\r\n\r\n", whole]
    with contextlib.ExitStack() as opened:
        for data in hung * 20:
            connection = opened.enter_context(socket.create_connection(served.address, LONG))
            with contextlib.suppress(OSError):
                connection.sendall(data)
        for number in range(3):
            (row,) = served.play(f"good-{number}")
            assert row.info["turns"] == 2
    for start in (head, head.replace(served.session["session"].encode(), b"forged")):
        with socket.create_connection(served.address, LONG) as endless, contextlib.suppress(OSError):
            endless.sendall(start + b"Transfer-Encoding: chunked\r\n\r\n")
            while True:
                endless.sendall(
                    b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
                )  # the gateway closes the connection
    served.play("good")
    refused = served.bed.gateway.refused
    assert refused.pop("too_many_requests") > 20, "those of its own session that hang count"
    refused.pop("max_turns", None)  # of whole ones that are answered before the others come
    assert refused == {"too_large": 1, "not_found": 1}


def test_bad_heads_and_methods_are_answered(served):
    assert served.raw(b"NONSENSE\r\n\r\n")[0] == 400
    assert served.raw(b"POST /sessions HTTP/1.1\r\nContent-Length: -5\r\n\r\n")[0] == 400
    assert served.post(call(), x_stainless_retry_count="many")[0] == 200, "counts as sent again"
    assert served.post(call(), idempotency_key="k" * 10_000)[0] == 200
    assert served.raw(b"DELETE /sessions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")[0] == 405
