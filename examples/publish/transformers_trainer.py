"""transformers' Trainer, publishing its steps with one line: `callbacks=[PublishWeights(...)]`.

python examples/arithmetic/make.py /tmp/base
syncd watch JOB &
python examples/publish/transformers_trainer.py JOB --model /tmp/base/model --steps 4 --every 2
"""

import argparse
import tempfile

from callback import PublishWeights
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)


def main() -> None:
    """Train a model to memorise sums."""
    options = _options()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model)
    sums = [f"{one}+{other}={one + other}" for one in range(10) for other in range(10)]
    with tempfile.TemporaryDirectory() as scratch:
        settings = TrainingArguments(
            output_dir=scratch,
            max_steps=options.steps,
            use_cpu=True,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
        )
        trainer = Trainer(
            model=model,
            args=settings,
            train_dataset=[tokenizer(text) for text in sums],
            data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
            callbacks=[PublishWeights(options.job, every=options.every)],
        )
        trainer.train()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", help="the job directory; must exist")
    parser.add_argument("--model", required=True, help="a directory with model and tokenizer")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--every", type=int, default=1, help="steps between two versions")
    return parser.parse_args()


if __name__ == "__main__":
    main()
