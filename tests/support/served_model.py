"""Serves a model directory as vLLM does, with transformers in this process, for pages that are typed:

    python served_model.py serve DIR --port PORT ...

Options of `vllm serve` that do not matter here are ignored.
"""

import argparse
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from support import small_qwen
from support.fake_engines import FakeVllm


class ServedModel(FakeVllm):
    """A stand-in for vLLM whose answers are those of the weights that it was told to load."""

    longest = 32

    def __init__(self, directory, port):
        self.started_from = directory
        self.port = port
        self.model = AutoModelForCausalLM.from_pretrained(directory).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        super().__init__()

    def take(self, directory):
        super().take(directory)
        self.model.load_state_dict(_tensors_in(directory))

    def generated(self, prompt):
        return small_qwen.likeliest(self.model, prompt)

    def evaluated(self, prompt):
        return small_qwen.expected(self.model, prompt, len(prompt) - 1)

    def followed(self, prompt, tokens):
        return small_qwen.following(self.model, prompt, tokens)

    def answered(self, prompt):
        tokens = self.tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            made = self.model.generate(tokens, max_new_tokens=4, do_sample=False)
        return self.tokenizer.decode(made[0, tokens.shape[1] :], skip_special_tokens=True)


def _tensors_in(directory):
    return {
        key: value for file in Path(directory).glob("*.safetensors") for key, value in load_file(file).items()
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("verb")
    parser.add_argument("directory")
    parser.add_argument("--port", type=int)
    options, _ = parser.parse_known_args()
    server = ServedModel(options.directory, options.port)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    server.stop()


if __name__ == "__main__":
    main()
