"""What is wrong with tasks and rewards in the job's file and no single key shows."""

from collections.abc import Iterator

from explorer_hooks.run.rewards import BUILT_IN, LIBRARY
from explorer_hooks.run.scoring import AUTO
from syncd.jobfile.model import JobFile
from syncd.jobfile.problems import Problem, nearest
from syncd.jobfile.roles import runner_of
from syncd.jobfile.task_sets import SET


def is_import_path(text: str) -> bool:
    module, colon, name = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in [*module.split("."), *name.split(".")])


def task_problems(file: JobFile) -> Iterator[Problem]:
    """Yield what is wrong with the tasks that `explorer run` plays."""
    section = file.explorer
    if not section.training_sets and not runner_of(section).has_own_tasks:
        yield Problem("explorer.tasks", "explorer.tasks is missing", 'tasks = "tasks.jsonl"')
    yield from _held_out(file)
    if section.tasks and any(not task_set.held_out for task_set in section.task_sets):
        text = "explorer.tasks names one set of tasks, and [[explorer.task_sets]] others"
        yield Problem("explorer.tasks", text, "give it a [[explorer.task_sets]] too, and leave it out")
    has_columns = {"prompt_key", "answer_key"} & section.model_fields_set
    if section.task_sets and has_columns and not section.evaluation.tasks:
        text = "explorer.prompt_key and answer_key are those of explorer.tasks"
        yield Problem("explorer.prompt_key", text, "give prompt_key and answer_key in [[explorer.task_sets]]")


def reward_problems(file: JobFile) -> Iterator[Problem]:
    yield from _rewards(file)
    yield from _difficulty(file)


def _held_out(file: JobFile) -> Iterator[Problem]:
    measured = {section.tasks for section in file.explorer.evaluation.named().values()}
    for task_set in file.explorer.task_sets:
        if task_set.held_out and f"{SET}{task_set.shown_name}" not in measured:
            text = f'the held-out set of tasks "{task_set.shown_name}" is not measured'
            yield Problem(
                "explorer.task_sets.held_out",
                text,
                f'explorer.evaluation.tasks = "{SET}{task_set.shown_name}"',
            )
        if task_set.held_out and task_set.weight:
            text = f'the held-out set of tasks "{task_set.shown_name}" has a weight, and is never taken'
            yield Problem("explorer.task_sets.weight", text, "leave it out")


def _difficulty(file: JobFile) -> Iterator[Problem]:
    curriculum, reward = file.explorer.curriculum, file.explorer.reward
    if curriculum.highest <= curriculum.lowest:
        text = f"explorer.curriculum.highest = {curriculum.highest:g} is not above lowest = {curriculum.lowest:g}"
        yield Problem("explorer.curriculum.highest", text)
    if reward.equal_groups == "drop" and file.data.group_size == 1:
        text = 'explorer.reward.equal_groups = "drop" drops every group of one rollout'
        yield Problem("explorer.reward.equal_groups", text, "data.group_size = 8")


def _rewards(file: JobFile) -> Iterator[Problem]:
    section, evaluation = file.explorer.reward, file.explorer.evaluation
    if section.functions:
        named = [("explorer.reward.functions", function) for function in section.functions]
    else:
        named = [("explorer.reward.function", section.function)]
    sets = ((f"sets.{name}.", evaluation_set) for name, evaluation_set in evaluation.sets.items())
    for key, measured in (("", evaluation), *sets):
        named += [(f"explorer.evaluation.{key}reward", measured.reward)] if measured.reward else []
    functions = sorted({AUTO, *BUILT_IN, *LIBRARY})
    for key, function in named:
        if function not in functions and not is_import_path(function):
            text = f'{key} = "{function}" is neither {", ".join(functions)} nor package.module:function'
            yield Problem(key, text, nearest(function, functions))
    if section.functions and "function" in section.model_fields_set:
        text = "[explorer.reward] has one function and several"
        yield Problem("explorer.reward.function", text, "leave it out, and give it a weight in functions")
