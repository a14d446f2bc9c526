"""One explorer from its configuration to its end: everything is opened here, and closed in reverse order."""

import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing

from explorer_hooks.run.batches import BatchMaker
from explorer_hooks.run.curriculum import DIFFICULTY, Curriculum
from explorer_hooks.run.engine_gate import EngineGate, EngineVersions
from explorer_hooks.run.explorer import Explorer
from explorer_hooks.run.extensions import READERS
from explorer_hooks.run.generation import Sampling
from explorer_hooks.run.held_out import open_evaluation
from explorer_hooks.run.open_explorer import followed_engine, open_reward
from explorer_hooks.run.own_files import EVALUATIONS, METRICS, Records, TaskLedger
from explorer_hooks.run.tokens import Tokens, hide_progress_bars, open_tokens
from explorer_hooks.stopping import Stop
from explorer_hooks.tasks.sources import open_tasks
from syncd.experience.writer import ExperienceWriter
from syncd.jobfile.model import JobFile
from syncd.observe import log
from syncd.registered import registered

Reader = Callable[[Sampling], Sampling]


def run(file: JobFile, health: str | None = None) -> str:
    """Explore as a file says, and return why that ended; `health`: HOST:PORT of health checks, None for none."""
    section = file.explorer
    log.configure(section.log, sys.stderr)
    hide_progress_bars()
    tasks = open_tasks(file.explorer.training_sets, file.directory)
    tokens = open_tokens(file.model.path, trust_remote_code=file.model.trust_remote_code)
    with Stop().on_signals() as stop, ExitStack() as opened:
        scorer = opened.enter_context(closing(open_reward(file)))
        sets = opened.enter_context(open_evaluation(file, scorer))
        readers = _open_readers(file, tokens)
        followed = opened.enter_context(followed_engine(file, stop, health))
        file, source, follower = followed.file, followed.source, followed.follower
        job, name = follower.client.job, follower.client.identity or ""
        seed = f"{file.job.seed}/{name}"
        writer = opened.enter_context(ExperienceWriter(job, name))
        ledger = TaskLedger.open(writer, tasks.digest, seed if section.shuffle else "")
        versions = EngineVersions(source, lambda: ledger.cursor.batches, file)
        draws = f"{seed}/{ledger.cursor.seed_text}"
        generator = followed.generator(tokens, versions.permitted, draws, stop)
        sampling = Sampling(file, tokens, generator, scorer, stop)
        records = Records.own(job, name, EVALUATIONS)
        gate = EngineGate(versions, sets.watcher_by_prompts(sampling, records), file.sync, stop)
        difficulty = Records.own(job, name, DIFFICULTY)
        curriculum = Curriculum(section.curriculum, difficulty, seed)
        batches = BatchMaker(tasks, ledger, _read_by(readers, sampling), gate, curriculum)
        metrics = Records.own(job, name, METRICS)
        return Explorer(versions, gate, batches, ledger, file, metrics, stop).run()


def _open_readers(file: JobFile, tokens: Tokens) -> list[Reader]:
    readers = (point.load()(file, tokens) for point in registered(READERS).values())
    return [reader for reader in readers if reader is not None]


def _read_by(readers: Iterable[Reader], sampling: Sampling) -> Sampling:
    """Return what makes responses for training; those of an evaluation nobody reads."""
    for reader in readers:
        sampling = reader(sampling)
    return sampling
