"""TRL's GRPO trainer, publishing each step with one line: `callbacks=[PublishWeights(...)]`.

    pip install trl
    python examples/arithmetic/make.py /tmp/base
    syncd watch JOB &
    python examples/publish/trl_grpo.py JOB --model /tmp/base/model --steps 2

Every trainer of TRL accepts callbacks in the same way.
"""

import argparse
import tempfile

from callback import PublishWeights
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


def main() -> None:
    """Reward short answers."""
    options = _options()
    with tempfile.TemporaryDirectory() as scratch:
        settings = GRPOConfig(
            output_dir=scratch,
            max_steps=options.steps,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=8,
            use_cpu=True,
            bf16=False,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
        )
        prompts = [f"{one}+{other}=" for one in range(10) for other in range(10)]
        trainer = GRPOTrainer(
            model=options.model,
            reward_funcs=lambda completions, **_: [-float(len(text)) for text in completions],
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            callbacks=[PublishWeights(options.job, every=options.every)],
        )
        trainer.train()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", help="the job directory, which exists")
    parser.add_argument("--model", required=True, help="a directory of model and tokenizer")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--every", type=int, default=1, help="steps between two versions")
    return parser.parse_args()


if __name__ == "__main__":
    main()
