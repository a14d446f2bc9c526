"""An agent that asks until an answer ends in `done`, and notes what it was told; it imports little, to start fast.

In SAID a file for each session gets a line for each answer as it came. A gateway that does not answer is asked again
for PATIENCE seconds, as clients of a served gateway do; without it the agent ends at once.
"""

import json
import os
import socket
import sys
import time

MOST = 12
HOST, _, REST = os.environ["OPENAI_BASE_URL"].removeprefix("http://").partition(":")
PORT, _, PATH = REST.partition("/")
SESSION, PATIENCE = os.environ["OPENAI_API_KEY"], float(os.environ.get("PATIENCE", "0"))


def main():
    history = [{"role": "user", "content": json.loads(os.environ["SYNCD_TASK"])["prompt"]}]
    with open(os.path.join(os.environ["SAID"], SESSION), "a", buffering=1) as said:
        for turn in range(MOST):
            text = ask(history, 0)
            said.write(json.dumps({"text": text}) + "\n")
            if int(text[1], 16) < 3 and ask(history, 1) != text:
                said.write(json.dumps({"wrong": f"turn {turn} was answered twice, differently"}) + "\n")
            history += [{"role": "assistant", "content": text}, {"role": "user", "content": f"go on {turn}"}]
            if text.endswith("done"):
                break
        said.write(json.dumps({"turns": turn + 1}) + "\n")
    print(json.dumps({"reward": turn + 1, "session": SESSION}))


def ask(history, again):
    """Return the answer to a history; `again` says how often it was asked before."""
    body = json.dumps({"model": "policy", "messages": history}).encode()
    end = time.monotonic() + PATIENCE
    while True:
        status, answer = post(body, again)
        if status == 200:
            return json.loads(answer)["choices"][0]["message"]["content"]
        if status not in (0, 503) or time.monotonic() > end:
            sys.exit(f"{status}: {answer[:300]!r}")
        again += 1
        time.sleep(0.02)


def post(body, again):
    """Return status and body of an answer, 0 for a connection that broke."""
    head = (
        f"POST /{PATH}/chat/completions HTTP/1.0\r\nHost: {HOST}\r\nContent-Length: {len(body)}\r\n"
        f"x-stainless-retry-count: {again}\r\n\r\n"
    )
    try:
        with socket.create_connection((HOST, int(PORT)), 60) as connection:
            connection.sendall(head.encode() + body)
            reply = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    except OSError as error:
        return 0, str(error)
    top, _, answer = reply.partition(b"\r\n\r\n")
    length = top.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
    if not length or len(answer) < int(length):
        return 0, "the answer broke off"
    return int(top.split()[1]), answer


main()
