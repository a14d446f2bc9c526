"""The contract that every hook keeps, and the bed in which it is shown.

A test module of a hook has a subclass of `Bed`, and one of `HookContract` that names it:

    class TestMine(HookContract):
        bed_type = MyBed

A case that the bed declares it cannot show is not collected.

When a test begins the engine runs its start weights and takes work; beds that share one engine among tests bring it
there themselves, not through the hook.
"""

import contextlib
import dataclasses
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import pytest

from explorer_hooks.hook import Hook, Running
from syncd.errors import EngineDeadError, EngineUnreachableError, LoadFailedError, RefusedError, SyncdError
from syncd.protocol.version import Pair, engine_label
from syncd.transports.base import WeightDirectory

HANGING = 60.0
"""Seconds after which a call counts as one that never ends."""

PATIENCE = 30.0
"""The time-out of a hook whose engine answers: only a failing test reaches it, however loaded the machine is."""

IMPATIENCE = 1.0
"""The time-out of a hook whose engine does not answer: each such call takes all of it."""


class Bed(ABC):
    """One engine, what it can be given, what it really does, and how it is broken."""

    cannot: ClassVar[Mapping[str, str]] = {}
    """What cannot be shown with this engine, and why.

    Keys: `label before commit`, `fail_load`, `fail_commit`, `gone`, `hung`, `restart`, `pause`, `reopen`, `shards`.
    """

    token: str | None = None
    """The secret that the hook is given, if this bed gives it one."""

    start_label: str | None = None
    """What the engine says that it runs when it was just started."""

    lists_tensors: ClassVar[bool] = False
    """Whether the hook lists the tensors of what runs."""

    patience = PATIENCE
    """The time-out of the hooks that `open` returns."""

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:  # noqa: B027 - not every engine has to be stopped
        """Stop the engine and remove what it left."""

    @abstractmethod
    def open(self) -> Hook:
        """Return a new hook for the engine, with `patience` for its time-out."""

    @abstractmethod
    def target(self, pair: Pair, *, shards: int = 1) -> WeightDirectory:
        """Return a version that the engine can load; another pair has other weights, the same pair the same ones."""

    @abstractmethod
    def runs(self, target: WeightDirectory | None) -> bool:
        """Say whether the engine runs exactly the weights of a target, None: its start weights.

        Never by the hook, never by a label: by a value, log-probs, or what else the weights themselves decide.
        """

    @abstractmethod
    def is_paused(self) -> bool:
        """Say whether the engine takes no work, not asking the hook."""

    def fail_load(self, target: WeightDirectory) -> None:
        """Make the next load fail, which is of this target, after it has begun; it may be damaged for that."""
        raise NotImplementedError

    def fail_commit(self) -> None:
        """Make the next commit fail."""
        raise NotImplementedError

    def gone(self) -> contextlib.AbstractContextManager[None]:
        """Take the engine away for a while: nobody is at its address."""
        raise NotImplementedError

    def hung(self) -> contextlib.AbstractContextManager[None]:
        """Stop the engine from answering for a while, though it is there."""
        raise NotImplementedError

    def restart(self) -> None:
        """Start the engine anew, with its start weights."""
        raise NotImplementedError

    def pause(self) -> None:
        """Pause the engine behind the hook's back, as a follower that died in the middle of a load leaves it."""
        raise NotImplementedError


def load(hook: Hook, target: WeightDirectory) -> None:
    """Do what a follower does with a version."""
    hook.prepare(target)
    hook.load(target)
    hook.commit(target)
    hook.settle(target)


def bounded(call):
    """Return what a call raised, None if nothing; fail if it never ends."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - it is looked at by the test
            raised.append(error)
        else:
            raised.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HANGING)
    if not raised:
        pytest.fail("the call has no end")
    return raised[0]


TOKEN = "a token"
"""Needed by cases for hooks that are given a secret."""


def needs(*what: str):
    """Mark a case with what it needs of a bed: keys of `Bed.cannot`, or `TOKEN`."""

    def mark(case):
        case.needs = frozenset(what)
        return case

    return mark


def shown(error: BaseException | None) -> str:
    """Return everything that anybody could print of an error and of those behind it."""
    texts = []
    while error is not None:
        texts += [str(error), repr(error), str(getattr(error, "hint", "")), str(getattr(error, "path", ""))]
        texts += traceback.format_exception(error)
        error = error.__cause__ or error.__context__
    return "\n".join(texts)


class BedCases:
    """Cases that a bed is given to; a subclass that names the bed collects those that the bed can show."""

    bed_type: ClassVar[type[Bed] | None] = None

    def __init_subclass__(cls) -> None:
        """Drop the cases that cannot apply to the bed, so that pytest does not collect them."""
        super().__init_subclass__()
        if cls.bed_type is None:
            return
        lacks = {*cls.bed_type.cannot, *(() if cls.bed_type.token else (TOKEN,))}
        for name in dir(cls):
            if lacks & getattr(getattr(cls, name), "needs", frozenset()):
                setattr(cls, name, None)

    @pytest.fixture
    def bed(self, tmp_path):
        """Return the bed."""
        with self.bed_type(tmp_path) as bed:
            yield bed

    @pytest.fixture
    def hook(self, bed):
        """Return a hook for the bed's engine."""
        hook = bed.open()
        yield hook
        hook.close()


class HookContract(BedCases):
    """What a follower relies on."""

    @pytest.fixture
    def served(self, bed, hook):
        """Return a version that was loaded and runs."""
        target = bed.target((1, 10))
        load(hook, target)
        return target

    @staticmethod
    def assert_serves(bed, hook, target):
        """Check that the engine runs a version, says so and works."""
        label = bed.start_label if target is None else target.label
        assert hook.current_version() == Running(label)
        assert bed.runs(target)
        assert not bed.is_paused()

    def test_a_fresh_engine_runs_its_start_weights(self, bed, hook):
        self.assert_serves(bed, hook, None)
        assert not bed.runs(bed.target((1, 10)))

    def test_prepare_does_not_touch_the_engine(self, bed, hook):
        hook.prepare(bed.target((1, 10)))
        self.assert_serves(bed, hook, None)

    def test_a_loaded_and_committed_version_runs(self, bed, hook):
        target = bed.target((1, 10))
        load(hook, target)
        self.assert_serves(bed, hook, target)

    def test_consecutive_versions_replace_each_other(self, bed, hook):
        for step in (10, 12, 15):
            target = bed.target((1, step))
            load(hook, target)
            self.assert_serves(bed, hook, target)

    @needs("shards")
    def test_a_version_in_several_shards_is_loaded(self, bed, hook):
        target = bed.target((1, 10), shards=3)
        assert len(target.shards) == 3
        load(hook, target)
        self.assert_serves(bed, hook, target)

    @needs("label before commit")
    @pytest.mark.fault("the version is set before the weights are loaded")
    def test_the_label_changes_only_with_the_commit(self, bed, hook, served):
        target = bed.target((1, 11))
        hook.prepare(target)
        assert hook.current_version().label == served.label
        hook.load(target)
        assert hook.current_version().label == served.label
        hook.commit(target)
        assert hook.current_version().label == target.label

    def test_the_same_version_can_be_loaded_twice(self, bed, hook, served):
        load(hook, served)
        self.assert_serves(bed, hook, served)

    def test_a_lower_step_of_a_new_generation_is_loaded(self, bed, hook, served):
        target = bed.target((2, 4))
        load(hook, target)
        self.assert_serves(bed, hook, target)
        assert hook.current_version().pair == (2, 4)

    def test_the_hook_s_tensor_list_matches_the_loaded_version(self, bed, hook, served):
        held = hook.tensors()
        assert (held is not None) is bed.lists_tensors
        if held is not None:
            assert {name: held.get(name) for name in served.tensors} == served.tensors

    @needs("fail_load")
    def test_after_a_failed_load_abort_restores_the_last_good_version(self, bed, hook, served):
        target = bed.target((1, 11))
        hook.prepare(target)
        bed.fail_load(target)
        with pytest.raises(LoadFailedError):
            hook.load(target)
        hook.abort(served)
        self.assert_serves(bed, hook, served)
        following = bed.target((1, 12))
        load(hook, following)
        self.assert_serves(bed, hook, following)

    @needs("fail_commit")
    def test_after_a_failed_commit_abort_restores_the_last_good_version(self, bed, hook, served):
        target = bed.target((1, 11))
        hook.prepare(target)
        hook.load(target)
        bed.fail_commit()
        with pytest.raises(LoadFailedError):
            hook.commit(target)
        hook.abort(served)
        self.assert_serves(bed, hook, served)
        following = bed.target((1, 12))
        load(hook, following)
        self.assert_serves(bed, hook, following)

    def test_a_load_before_its_commit_can_be_rolled_back(self, bed, hook, served):
        target = bed.target((1, 11))
        hook.prepare(target)
        hook.load(target)
        hook.abort(served)
        self.assert_serves(bed, hook, served)

    def test_a_committed_version_can_be_rolled_back(self, bed, hook, served):
        load(hook, bed.target((1, 11)))
        hook.abort(served)
        self.assert_serves(bed, hook, served)

    @needs("fail_load")
    def test_a_failed_first_load_leaves_the_start_weights_or_a_dead_engine(self, bed, hook):
        target = bed.target((1, 10))
        hook.prepare(target)
        bed.fail_load(target)
        with pytest.raises(LoadFailedError):
            hook.load(target)
        dead = bounded(lambda: hook.abort(None))
        if dead is None:
            self.assert_serves(bed, hook, None)
        else:
            assert isinstance(dead, EngineDeadError)
            assert dead.hint

    def test_abort_before_any_load_keeps_the_start_weights(self, bed, hook):
        hook.prepare(bed.target((1, 10)))
        hook.abort(None)
        self.assert_serves(bed, hook, None)

    @needs("restart")
    def test_a_restarted_engine_reports_no_version_and_can_be_loaded(self, bed, hook, served):
        bed.restart()
        self.assert_serves(bed, hook, None)
        load(hook, served)
        self.assert_serves(bed, hook, served)

    @needs("pause")
    def test_an_engine_left_paused_reports_it_and_the_next_load_resumes_it(self, bed, hook, served):
        bed.pause()
        assert bed.is_paused()
        assert hook.current_version().paused
        target = bed.target((1, 11))
        load(hook, target)
        self.assert_serves(bed, hook, target)

    @needs("pause")
    def test_abort_resumes_an_engine_left_paused(self, bed, hook, served):
        bed.pause()
        hook.abort(served)
        self.assert_serves(bed, hook, served)

    @needs("reopen")
    def test_another_hook_continues_after_one_was_killed_before_its_commit(self, bed, hook, served):
        target = bed.target((1, 11))
        hook.prepare(target)
        hook.load(target)
        with contextlib.closing(bed.open()) as other:
            found = other.current_version()
            assert found.paused or found.label != target.label
            following = bed.target((1, 12))
            load(other, following)
            self.assert_serves(bed, other, following)

    def test_close_leaves_the_engine_running(self, bed, served):
        hook = bed.open()
        target = bed.target((1, 11))
        load(hook, target)
        hook.close()
        assert bed.runs(target)
        assert not bed.is_paused()

    @needs("reopen")
    def test_a_new_hook_finds_the_version_of_a_closed_one(self, bed, served):
        hook = bed.open()
        target = bed.target((1, 11))
        load(hook, target)
        hook.close()
        with contextlib.closing(bed.open()) as other:
            self.assert_serves(bed, other, target)

    @needs("gone")
    @pytest.mark.slow
    def test_an_engine_that_is_down_is_unreachable_within_the_time_out(self, bed, hook, served):
        self.assert_unreachable(bed, hook, served, bed.gone)

    @needs("hung")
    @pytest.mark.slow
    def test_an_engine_that_does_not_answer_is_unreachable_within_the_time_out(self, bed, hook, served):
        self.assert_unreachable(bed, hook, served, bed.hung)

    def assert_unreachable(self, bed, hook, served, broken):
        """Check that calls fail in time while the engine is broken, and that it can be loaded afterwards."""
        target = bed.target((1, 11))
        bed.patience = IMPATIENCE
        with contextlib.closing(bed.open()) as impatient, broken():
            assert isinstance(bounded(impatient.current_version), EngineUnreachableError)
            raised = bounded(lambda: load(impatient, target))
            assert isinstance(raised, EngineUnreachableError | LoadFailedError)
            raised = bounded(lambda: impatient.abort(served))
            assert isinstance(raised, EngineUnreachableError | EngineDeadError)
        load(hook, target)
        self.assert_serves(bed, hook, target)

    def test_an_unsupported_kind_is_refused_before_the_engine_is_touched(self, bed, hook):
        good = bed.target((1, 10))
        (other, *_) = sorted({"weights", "delta", "lora"} - hook.kinds)
        version = dataclasses.replace(good.version, kind=other)
        with pytest.raises(RefusedError, match=other):
            hook.prepare(dataclasses.replace(good, version=version))
        self.assert_serves(bed, hook, None)

    def test_a_missing_directory_is_refused_before_the_engine_is_touched(self, bed, hook):
        good = bed.target((1, 10))
        missing = f"{good.path}-not-there"
        with pytest.raises(RefusedError) as refusal:
            hook.prepare(dataclasses.replace(good, path=missing))
        assert missing in str(refusal.value)
        self.assert_serves(bed, hook, None)

    @needs(TOKEN)
    def test_no_error_message_contains_the_token(self, bed, hook):
        errors = [bounded(lambda: hook.prepare(dataclasses.replace(bed.target((1, 9)), path="/not/there")))]
        target = bed.target((1, 10))
        if "fail_load" not in bed.cannot:
            hook.prepare(target)
            bed.fail_load(target)
            errors += [bounded(lambda: hook.load(target)), bounded(lambda: hook.abort(None))]
        if "gone" not in bed.cannot:
            with bed.gone():
                errors.append(bounded(hook.current_version))
        found = [error for error in errors if error is not None]
        assert found
        assert all(isinstance(error, SyncdError) for error in found)
        assert not any(bed.token in shown(error) for error in found)
        assert bed.token not in repr(hook)

    def test_the_label_names_generation_step_and_digest(self, bed, hook, served):
        assert hook.current_version().label == engine_label(served.version.pair, served.version.digest)
