"""A callback that publishes the weights of transformers' Trainer and of every trainer of TRL.

    trainer = GRPOTrainer(..., callbacks=[PublishWeights("/ckpt/job", every=1)])

Each rank writes its share of the tensors in the background of training; only one copy in memory blocks. The
directory of a step loads with `from_pretrained`. With DDP and FSDP2 give the callback to each rank unchanged. It
does not gather parameters that DeepSpeed's ZeRO-3 has sharded.
"""

import uuid
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from syncd.protocol.layout import Job
from syncd.synchronizer import Synchronizer
from syncd.transports.files.step_saver import StepSaver


class PublishWeights(TrainerCallback):
    """Publishes every `every` steps, and the last one.

    Args:
        job: The job directory; must exist.
        every: Optimizer steps between two versions.
        dtype: The dtype to cast weights to; None keeps theirs.
        companions: Files beside the weights by name, such as the tokenizer's.
    """

    def __init__(
        self,
        job: str,
        every: int = 1,
        dtype: torch.dtype | None = None,
        companions: Mapping[str, bytes] | None = None,
    ) -> None:
        self._job, self._every, self._dtype, self._companions = job, every, dtype, companions or {}
        self._published = 0

    def on_train_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Publish this trainer's presence and prepare to write."""
        self._saver = StepSaver(Job.at(self._job), args.process_index, args.world_size, dtype=self._dtype)
        self._sync = Synchronizer.open(self._job, "trainer") if args.process_index == 0 else None
        self._published = state.global_step

    def on_step_end(self, _: Any, state: Any, __: Any, model: Any = None, **___: Any) -> None:
        """Publish if a step is due; wait for the save before it and raise its error here."""
        if state.global_step % self._every == 0:
            self._publish(state.global_step, model)

    def on_train_end(self, _: Any, state: Any, __: Any, model: Any = None, **___: Any) -> None:
        """Publish the last step, wait until it is durable, and report that this trainer has ended."""
        self._publish(state.global_step, model)
        self._saver.close()
        if self._sync is not None:
            self._sync.close()

    def _publish(self, step: int, model: Any) -> None:
        if step == self._published:
            return
        config = model.config.to_json_string().encode()
        files = {"config.json": config, **self._companions}
        self._saver.save(step, _agreed(uuid.uuid4().hex), model.state_dict().items(), files)
        self._published = step


def _agreed(name: str) -> str:
    """Return rank 0's name for a save: the same on all ranks and unique."""
    names = [name]
    if dist.is_initialized():
        dist.broadcast_object_list(names)
    return names[0]
