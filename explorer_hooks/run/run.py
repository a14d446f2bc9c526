"""One explorer from its configuration to its end: everything is opened here, and closed in reverse order."""

import sys
from contextlib import ExitStack, closing
from dataclasses import replace

from explorer_hooks.run.batches import BatchMaker
from explorer_hooks.run.config import ExplorerFile
from explorer_hooks.run.curriculum import DIFFICULTY, Curriculum
from explorer_hooks.run.engine_gate import EngineGate, EngineVersions
from explorer_hooks.run.evaluation import Evaluation, PromptEvaluator
from explorer_hooks.run.evaluation_sets import open_sets
from explorer_hooks.run.explorer import Explorer
from explorer_hooks.run.generation import Sampling
from explorer_hooks.run.opening import followed_engine, open_reward
from explorer_hooks.run.own_files import EVALUATIONS, METRICS, Records, TaskLedger, own_path
from explorer_hooks.run.pacing import ahead_of
from explorer_hooks.run.teacher import TaughtGenerator, Teacher
from explorer_hooks.run.tokens import hide_progress_bars, open_tokens
from explorer_hooks.stopping import Stop
from explorer_hooks.tasks.sources import open_tasks
from syncd.experience.writer import ExperienceWriter
from syncd.observe import log


def run(file: ExplorerFile, health: str | None = None) -> str:
    """Explore as a file says, and return why the explorer ended.

    Args:
        health: `HOST:PORT` to answer health checks at; None for nowhere.
    """
    section = file.explorer
    log.configure(section.log, sys.stderr)
    hide_progress_bars()
    tasks = open_tasks(file.task_sets, file.directory)
    tokens = open_tokens(file.model.path, trust_remote_code=file.model.trust_remote_code)
    with Stop().on_signals() as stop, ExitStack() as opened:
        scorer = opened.enter_context(closing(open_reward(file)))
        sets = opened.enter_context(open_sets(file, scorer, lambda _, one: bool(one.every)))
        teacher = Teacher(section.teacher, tokens) if section.teacher.address else None
        followed = opened.enter_context(followed_engine(file, stop, health))
        file, source, follower = followed.file, followed.source, followed.follower
        job, name = follower.client.job, follower.client.identity or ""
        seed = f"{file.job.seed}/{name}"
        writer = opened.enter_context(ExperienceWriter(job, name))
        ledger = TaskLedger.open(writer, tasks.digest, seed if section.shuffle else "")
        versions = EngineVersions(
            source, lambda: ledger.cursor.batches, file.data.groups / file.groups, ahead_of(file)
        )
        draws = f"{seed}/{ledger.cursor.seed_text}"
        generator = followed.generator(tokens, versions.permitted, draws, stop)
        sampling = Sampling(file, tokens, generator, scorer, stop)
        records = Records(own_path(job, name, EVALUATIONS), job.disk)
        evaluation = Evaluation(sets, records, PromptEvaluator(sampling)) if sets else None
        gate = EngineGate(versions, evaluation, file.sync, stop)
        difficulty = Records(own_path(job, name, DIFFICULTY), job.disk)
        curriculum = Curriculum(section.curriculum, difficulty, seed)
        batches = BatchMaker(tasks, ledger, _taught(sampling, teacher), gate, curriculum)
        metrics = Records(own_path(job, name, METRICS), job.disk)
        return Explorer(versions, gate, batches, ledger, file, metrics, stop).run()


def _taught(sampling: Sampling, teacher: Teacher | None) -> Sampling:
    """Return what makes responses that the teacher reads; those of an evaluation it does not."""
    if teacher is None:
        return sampling
    return replace(sampling, generator=TaughtGenerator(sampling.generator, teacher, sampling.stop))
