"""A server that an explorer starts: a fake vLLM whose tokens say by which step they were chosen.

fake_vllm.py MODEL --port PORT [...]: in PLACE of the environment the file `starts` gets a line for each start; a file
`broken` ends the server at its start, and one called `die` later.
"""

import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from support.fake_engines import FakeVllm


class ServedTokens(FakeVllm):
    def post_v1_completions(self, query, body):
        self.running.wait(60)
        with self.lock:
            step = 0 if self.label == "default" else int(self.label.split(".")[1])
        values = {"token_logprobs": [-0.5] * 3, "tokens": ["x"] * 3}
        choice = {
            "text": str(step),
            "token_ids": [step + 1] * 3,
            "logprobs": values,
            "finish_reason": "length",
        }
        return {"choices": [choice] * body["n"]}


def main(model, *options):
    port, place = options[options.index("--port") + 1], os.environ["PLACE"]
    with open(f"{place}/starts", "a") as file:
        file.write(f"{os.getpid()} {port} {os.environ.get('CUDA_VISIBLE_DEVICES', '-')} {model}\n")
    if os.path.exists(f"{place}/broken"):
        sys.exit("out of memory")
    ServedTokens.started_from, ServedTokens.port = model, int(port)
    ServedTokens()
    while not os.path.exists(f"{place}/die"):
        time.sleep(0.05)


if __name__ == "__main__":
    main(*sys.argv[1:])
