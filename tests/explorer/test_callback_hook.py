"""The hook for one's own Python: the contract, and what becomes of whatever that Python does."""

import contextlib
import os
import threading
from typing import ClassVar

import pytest
from support.hook_contract import PATIENCE, Bed, HookContract, bounded, load
from support.jobs import shard_bytes
from support.targets import target_of

from explorer_hooks.hook import HookOptions, Running
from explorer_hooks.hooks.callback import CallbackHook
from syncd.errors import ConfigError, EngineDeadError, EngineUnreachableError, LoadFailedError

START = b"start"


class OwnEngine:
    """Holds the bytes of all shards; whatever it is told to fail in fails once."""

    def __init__(self):
        self.weights, self.label, self.paused = START, None, False
        self.failing, self.gone, self.free = set(), False, threading.Event()
        self.free.set()

    def _work(self, what):
        self.free.wait(30)
        if self.gone:
            raise ConnectionRefusedError("nobody is there")
        if what in self.failing:
            self.failing.discard(what)
            raise RuntimeError(f"no {what} today")

    def load(self, target):
        self.paused = True
        self.weights = b"half of it"
        self._work("load")
        self.weights = content_of(target)

    def commit(self, target):
        self._work("commit")
        self.label, self.paused = target.label, False

    def current(self):
        self._work("current")
        return Running(self.label, self.paused)


def content_of(target):
    pieces = []
    for shard in target.shards:
        with open(f"{target.path}/{shard.name}", "rb") as file:
            pieces.append(file.read())
    return b"".join(pieces)


def write_shards(directory, salt, shards=1):
    """Write a version of small tensors, whose content follows from the salt."""
    os.makedirs(directory, exist_ok=True)
    for number in range(1, shards + 1):
        with open(f"{directory}/model-{number:05d}-of-{shards:05d}.safetensors", "wb") as file:
            file.write(shard_bytes({f"layer.{number}.weight": (4, 8)}, salt))


class OwnBed(Bed):
    def __init__(self, directory):
        self.directory, self.engine = directory, OwnEngine()

    def open(self):
        engine = self.engine
        return CallbackHook(engine.load, engine.current, commit=engine.commit, timeout=self.patience)

    def target(self, pair, *, shards=1):
        place = self.directory / f"{pair[0]}.{pair[1]}-{shards}"
        write_shards(place, 31 * pair[0] + pair[1], shards)
        return target_of(place, pair)

    def runs(self, target):
        return self.engine.weights == (START if target is None else content_of(target))

    def is_paused(self):
        return self.engine.paused

    def fail_load(self, target):
        self.engine.failing.add("load")

    def fail_commit(self):
        self.engine.failing.add("commit")

    @contextlib.contextmanager
    def gone(self):
        self.engine.gone = True
        yield
        self.engine.gone = False

    @contextlib.contextmanager
    def hung(self):
        self.engine.free.clear()
        yield
        self.engine.free.set()

    def restart(self):
        self.engine.weights, self.engine.label, self.engine.paused = START, None, False

    def pause(self):
        self.engine.paused = True


class TestOneThatSaysWhatItRuns(HookContract):
    bed_type = OwnBed


class QuietBed(OwnBed):
    """Only `load` is given; the hook remembers the rest."""

    cannot: ClassVar = {
        **dict.fromkeys(("gone", "hung", "restart", "pause"), "there is nobody to ask what the engine runs"),
        "fail_commit": "there is no function that commits",
        "reopen": "the label is kept by the hook that committed it",
    }

    def open(self):
        return CallbackHook(self._load, timeout=self.patience)

    def _load(self, target):
        self.engine.load(target)
        self.engine.paused = False


class TestOneThatOnlyLoads(HookContract):
    bed_type = QuietBed


@pytest.fixture
def target(tmp_path):
    write_shards(tmp_path / "1.5", 5)
    return target_of(tmp_path / "1.5", (1, 5))


def raising(error):
    def call(*_):
        raise error

    return call


@pytest.mark.parametrize(
    ("raised", "becomes"),
    [
        (ValueError("bad"), LoadFailedError),
        (ConnectionResetError("gone"), EngineUnreachableError),
        (TimeoutError("late"), EngineUnreachableError),
        (EngineDeadError("it says so itself"), EngineDeadError),
    ],
)
def test_exceptions_of_load_are_mapped_to_hook_errors(target, raised, becomes):
    hook = CallbackHook(raising(raised))
    hook.prepare(target)
    with pytest.raises(becomes):
        hook.load(target)
    hook.close()


def test_a_failing_current_is_an_unreachable_engine():
    hook = CallbackHook(print, current=raising(KeyError("label")))
    with pytest.raises(EngineUnreachableError, match="KeyError"):
        hook.current_version()
    hook.close()


@pytest.mark.parametrize("returned", [7, b"1.7", ["1.7"], Running(7)])
def test_a_current_that_returns_no_label_is_an_unreachable_engine(returned):
    hook = CallbackHook(print, current=lambda: returned)
    with pytest.raises(EngineUnreachableError, match="the function current returned") as caught:
        hook.current_version()
    assert "target.label" in caught.value.hint
    hook.close()


def test_current_may_return_the_label_only():
    hook = CallbackHook(print, current=lambda: "3.7")
    assert hook.current_version() == Running("3.7")
    hook.close()


def test_abort_is_called_without_a_good_version_only_after_a_load(target):
    asked = []
    hook = CallbackHook(raising(ValueError("bad")), abort=asked.append)
    hook.prepare(target)
    hook.abort(None)
    assert asked == []
    with pytest.raises(LoadFailedError):
        hook.load(target)
    hook.abort(None)
    assert asked == [None]
    assert hook.current_version() == Running(None)
    hook.close()


def test_a_failing_rollback_is_a_dead_engine(target):
    hook = CallbackHook(raising(ValueError("bad")))
    with pytest.raises(EngineDeadError, match="bad"):
        hook.abort(target)
    hook.close()


def test_a_call_times_out_and_the_next_one_waits_for_it(target):
    free, calls = threading.Event(), []

    def slow(one):
        calls.append(one.label)
        free.wait(30)

    hook = CallbackHook(slow, timeout=0.1)
    assert isinstance(bounded(lambda: load(hook, target)), LoadFailedError)
    assert isinstance(bounded(lambda: hook.load(target)), EngineUnreachableError)
    free.set()
    hook._timeout = PATIENCE
    load(hook, target)
    assert calls == [target.label, target.label]  # the one that did not begin in time never did
    hook.close()


def test_all_callbacks_run_in_the_same_thread(target):
    threads = set()
    hook = CallbackHook(
        lambda _: threads.add(threading.get_ident()),
        current=lambda: threads.add(threading.get_ident()),
        commit=lambda _: threads.add(threading.get_ident()),
    )
    load(hook, target)
    hook.current_version()
    assert len(threads) == 1
    assert threads != {threading.get_ident()}
    hook.close()


def test_an_import_path_may_name_a_function_a_module_or_an_object(tmp_path, monkeypatch, target):
    (tmp_path / "own_engine_of_a_test.py").write_text(
        "seen = []\ndef load(target): seen.append(target.label)\n"
        "class Engine:\n    def load(self, target): seen.append('engine ' + target.label)\n"
        "    def current(self): return '9.9'\nengine = Engine()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for path in ("own_engine_of_a_test:load", "own_engine_of_a_test", "own_engine_of_a_test:engine"):
        hook = CallbackHook.from_options(HookOptions(address=path))
        load(hook, target)
        hook.close()
    import own_engine_of_a_test

    assert own_engine_of_a_test.seen == [target.label, target.label, f"engine {target.label}"]


@pytest.mark.parametrize(
    ("address", "says"),
    [
        (None, "import path"),
        ("no_such_module_here:load", "no_such_module_here"),
        ("os:no_such_thing", "no_such_thing"),
        ("os:sep", "not a function"),
        ("os; import sys:x", "not an import path"),
        ("", "import path"),
    ],
)
def test_a_wrong_import_path_is_refused(address, says):
    with pytest.raises(ConfigError, match=says):
        CallbackHook.from_options(HookOptions(address=address))
