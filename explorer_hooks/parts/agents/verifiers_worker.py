"""Plays episodes of an environment of `verifiers`. A program of its own: its interpreter needs verifiers, not syncd.

It reads lines of JSON, and answers with lines of JSON. The first one says which environment is loaded; the answer has
its tasks. Each further one asks for an episode of one of them; the answer has the rewards of its rollouts. It ends
when its input does.
"""

import asyncio
import copy
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

_SHOWN = 400
_NAME = 100  # characters of a task's id
_CHAT_PROGRAMS = ("bash", "null")  # harnesses of verifiers that run a script by uv

_LOCAL = {"type": "subprocess"}
_OWNER = os.getpid()


class UnusableError(Exception):
    """The environment cannot be played here; the text says why, and the second one what helps."""


def loaded(asked: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    try:
        import verifiers.v1 as vf  # noqa: PLC0415 - what it lacks is said in a line of JSON
    except ImportError as error:
        text = f"verifiers cannot be imported by {sys.executable}: {error}"
        raise UnusableError(text, "pip install verifiers==0.4.0 uv, or explorer.agent.python") from error
    env = vf.load_environment(_config(asked["environment"], asked["options"]))
    _check_roles(env.config)
    _check_tools(env)
    view = env.taskset.select(vf.SelectConfig.model_validate(asked["select"]))
    if not view.bounded:
        raise UnusableError("it has tasks without end", "[explorer.agent.select] limit = 1000")
    tasks = list(view)
    if not tasks:
        raise UnusableError("it has no task", "check [explorer.agent.select]")
    boxed = next((task for task in tasks if task.NEEDS_CONTAINER or task.data.image is not None), None)
    if boxed is not None:
        raise UnusableError(
            f"task {_id(boxed)} needs a container", "choose others by [explorer.agent.select]"
        )
    return env, tasks


def _config(name: str, options: Mapping[str, Any]) -> Any:
    """Return the configuration of `TASKSET` or `ENVIRONMENT+TASKSET`; all that it starts runs on this host."""
    from verifiers.v1 import env_config_type, resolve_env_config  # noqa: PLC0415 - as above

    kind, _, taskset = name.rpartition("+")
    data = copy.deepcopy(dict(options))
    data.setdefault("taskset", {})["id"] = taskset
    if kind:
        data["id"] = kind
    for role, default in _role_defaults(env_config_type(taskset, kind)):
        table = data.setdefault(role, {})
        if (
            "runtime" not in table
            and "runtime" in default.model_fields_set
            and default.runtime.type != "subprocess"
        ):
            raise UnusableError(
                f"its role {role} is made for the runtime {default.runtime.type}",
                f'if it works on this host too: [explorer.agent.options.{role}.runtime] type = "subprocess"',
            )
        table.setdefault("runtime", _LOCAL)
    harnesses = resolve_env_config(copy.deepcopy(data)).agent_harnesses()
    for role, harness in harnesses.items():
        if harness.id == "bash" and "harness" not in data[role]:
            # Nobody has asked for it, and it runs what the model writes.
            data[role]["harness"] = {"id": "null"}
    return resolve_env_config(data)


def _role_defaults(config: Any) -> Iterator[tuple[str, Any]]:
    from verifiers.v1 import AgentConfig  # noqa: PLC0415 - as above

    for name, field in config.model_fields.items():
        if isinstance(field.default, AgentConfig):
            yield name, field.default


def _check_roles(config: Any) -> None:
    """Check that a configuration starts nothing elsewhere, and leaves further attempts to the explorer."""
    from verifiers.v1.utils.loaders import harness_class  # noqa: PLC0415 - as above

    retries = [("", config.retries)]
    for role, harness in config.agent_harnesses().items():
        section = getattr(config, role)
        retries.append((f"{role}.", section.retries))
        key = f"explorer.agent.options.{role}"
        if section.runtime.type != "subprocess":
            text = f"{key}.runtime.type = {section.runtime.type!r}: environments run on this host"
            raise UnusableError(text, 'type = "subprocess", or leave it out')
        if harness_class(harness.id).NEEDS_CONTAINER:
            text = f"its role {role} plays with the harness {harness.id}, which needs a container"
            raise UnusableError(text, f'[{key}.harness] id = "null"')
        if harness.id in _CHAT_PROGRAMS and shutil.which("uv") is None:
            text = f"its role {role} plays with the harness {harness.id}, which needs uv"
            raise UnusableError(text, "pip install uv, or a harness of your own")
    for where, retry in retries:
        if retry.max_retries or retry.rules:
            text = f"explorer.agent.options.{where}retries: the explorer tries again, in a new session"
            raise UnusableError(text, "explorer.agent.retries")


def _check_tools(env: Any) -> None:
    """Check that all servers of tools run on this host, or are there already."""
    taskset = env.taskset
    servers = [
        *taskset.toolsets(taskset.config),
        *type(taskset).task_type().toolsets(taskset.config.task),
    ]
    for server in servers:
        kind = server.config.runtime.type
        if not server.config.url and not getattr(server.config, "colocated", False) and kind != "subprocess":
            text = f"its tools {type(server).__name__} run in {kind}: environments run on this host"
            raise UnusableError(text, 'set their runtime to "subprocess" in [explorer.agent.options]')


def _id(task: Any) -> str:
    name = task.data.id or task.data.name or ""
    return name if 0 < len(name) <= _NAME and name.isprintable() else f"task-{task.data.idx}"


async def episode(env: Any, task: Any, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Play an episode, and return the rewards of its rollouts, or why there are none.

    Each trace that is trained gets one of the sessions as its id, which verifiers' client sends with each request.
    """
    from verifiers.v1 import EvalClientConfig, ModelContext  # noqa: PLC0415 - as above

    free, address = iter(asked["sessions"]), asked["base_url"]

    def begins(trace: Any) -> None:
        if _is_trained(trace, address):
            trace.id = next(free, trace.id)

    context = ModelContext(model=asked["model"], client=EvalClientConfig(base_url=address, api_key_var=""))
    try:
        async with asyncio.timeout(asked["timeout"]):
            [slot] = env.slots(task)
            played = await env.run_slot(slot, context, on_trace=begins)
        return _rewards(env, played, address, asked["sessions"])
    except TimeoutError:
        return {"problem": f"it took more than {asked['timeout']:g} s"}
    except Exception as error:  # noqa: BLE001 - whatever an environment raises costs its attempt
        return {"problem": _problem(type(error).__name__, error)}


def _is_trained(trace: Any, address: str) -> bool:
    return bool(trace.agent.trainable and _asks(trace, address))


def _asks(trace: Any, address: str) -> bool:
    client = trace.agent.config.client
    return client is not None and client.base_url == address


def _rewards(env: Any, played: Any, address: str, sessions: Sequence[str]) -> dict[str, Any]:
    """Return the rewards of an episode's rollouts; what cannot be trained is said before errors that follow."""
    for trace in played.traces:
        if _asks(trace, address) and not trace.agent.trainable:
            name = trace.agent.name
            text = f"its role {name} is not trained, and has no endpoint of its own"
            return {"problem": f"{text} (explorer.agent.options.{name}.client.base_url)"}
    trained = {trace.id: trace for trace in played.traces if _is_trained(trace, address)}
    wrong = {"problem": f"it made {len(trained)} traces that are trained where {len(sessions)} are expected"}
    if len(trained) > len(sessions):
        return wrong
    if not env.complete(played):
        failed = [trace for trace in played.traces if not trace.ok]
        errors = [*played.errors, *(error for trace in failed for error in trace.errors)]
        said = _problem(errors[-1].type, errors[-1].message) if errors else "it did not complete its episode"
        return {"problem": said}
    if set(trained) != set(sessions):
        return wrong
    return {"rollouts": [_rollout(trained[name]) for name in sessions]}


def _rollout(trace: Any) -> dict[str, Any]:
    """Return the reward of a trace and its parts; without `reward` if not all of it was scored."""
    unscored = [name for name, reward in trace.rewards.items() if reward is None]
    if unscored or not trace.rewards:
        return {"problem": f"it gave no reward{f' {unscored[0]}' if unscored else ''}"[:_SHOWN]}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    parts = {name: reward.score for name, reward in trace.rewards.items()}
    return {"reward": trace.reward, "info": {**metrics, **parts}}


def _problem(kind: str, said: object) -> str:
    return f"{kind}: {said}"[:_SHOWN]


async def serve(env: Any, tasks: Sequence[Any], requests: TextIO, answers: TextIO) -> None:
    loop, playing = asyncio.get_running_loop(), set[asyncio.Task[None]]()

    async def answer(asked: Mapping[str, Any]) -> None:
        result = await episode(env, tasks[asked["task"]], asked)
        try:
            _say(answers, {"id": asked["id"], **result})
        except (TypeError, ValueError) as error:  # a metric that JSON does not have
            _say(answers, {"id": asked["id"], "problem": _problem(type(error).__name__, error)})

    async with env.serving():
        _say(answers, {"tasks": [{"id": _id(task), "digest": task.hash} for task in tasks]})
        while line := await loop.run_in_executor(None, requests.readline):
            task = loop.create_task(answer(json.loads(line)))
            playing.add(task)
            task.add_done_callback(playing.discard)
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)


def _say(answers: TextIO, said: Mapping[str, Any]) -> None:
    line = json.dumps(said) + "\n"
    if os.getpid() != _OWNER:
        os._exit(0)  # what was played has forked, and its child came back too: one of them answers
    answers.write(line)
    answers.flush()


def main() -> None:
    # What an environment prints must not mix with the answers, nor may its tools read what is asked.
    requests, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    os.environ["PATH"] = os.pathsep.join(
        [os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable)]
    )
    try:
        env, tasks = loaded(json.loads(requests.readline()))
        asyncio.run(serve(env, tasks, requests, answers))
    except UnusableError as error:
        text, hint = error.args
        _say(answers, {"problem": text, "hint": hint})
    except Exception as error:  # noqa: BLE001 - the user sees whatever loading it raises
        _say(answers, {"problem": _problem(type(error).__name__, error)})


if __name__ == "__main__":
    main()
