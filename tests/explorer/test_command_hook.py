"""The hook for a program of one's own: the contract with real processes, and what hostile ones do."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import ClassVar

import pytest
from support.followers import Scene
from support.held import held
from support.hook_contract import Bed, HookContract, bounded, load
from support.targets import label, target_of
from test_callback_hook import content_of, write_shards

from explorer_hooks.hook import HookOptions, Running
from explorer_hooks.hooks import process
from explorer_hooks.hooks.command import CommandHook
from explorer_hooks.hooks.process import run
from syncd.errors import ConfigError, EngineDeadError, EngineUnreachableError, LoadFailedError, RefusedError
from syncd.protocol.version import UNKNOWN_LABEL, Version
from syncd.transports.base import WeightDirectory

# An engine that is a directory: what it runs, what it says of itself, and how it is broken are files.
PROGRAM = r"""
engine=$1
[ -e "$engine/hung" ] && exec sleep 60
[ -e "$engine/gone" ] && { echo "nobody is there" >&2; exit 69; }
fails() { [ -e "$engine/fail-$1" ] && rm "$engine/fail-$1"; }
case $SYNCD_PHASE in
current) cat "$engine/label"; [ -e "$engine/paused" ] && echo paused; exit 0;;
load|abort)
    : > "$engine/paused"
    echo half > "$engine/weights"
    fails load && { echo "no load today" >&2; exit 1; }
    cat "$SYNCD_PATH"/*.safetensors > "$engine/weights";;
esac
case $SYNCD_PHASE in commit|abort)
    fails commit && exit 1
    echo "$SYNCD_LABEL" > "$engine/label"
    rm "$engine/paused";;
esac
exit 0
"""


class ProgramBed(Bed):
    def __init__(self, directory):
        self.directory, self.engine = directory, directory / "engine"
        self.engine.mkdir()
        (directory / "program.sh").write_text(PROGRAM)
        self.command = ["/bin/sh", str(directory / "program.sh"), str(self.engine)]
        self.restart()

    def open(self):
        return CommandHook(
            self.command, current=self.command, phases=("load", "commit"), timeout=self.patience
        )

    def target(self, pair, *, shards=1):
        place = self.directory / f"{pair[0]}.{pair[1]}-{shards}"
        write_shards(place, 31 * pair[0] + pair[1], shards)
        return target_of(place, pair)

    def runs(self, target):
        expected = b"start" if target is None else content_of(target)
        return (self.engine / "weights").read_bytes() == expected

    def is_paused(self):
        return (self.engine / "paused").exists()

    def pause(self):
        (self.engine / "paused").touch()

    def fail_load(self, target):
        (self.engine / "fail-load").touch()

    def fail_commit(self):
        (self.engine / "fail-commit").touch()

    @contextlib.contextmanager
    def _broken(self, how):
        (self.engine / how).touch()
        yield
        (self.engine / how).unlink()

    def gone(self):
        return self._broken("gone")

    def hung(self):
        return self._broken("hung")

    def restart(self):
        (self.engine / "weights").write_bytes(b"start")
        (self.engine / "label").write_text("-\n")
        (self.engine / "paused").unlink(missing_ok=True)


class TestProgramThatSaysWhatRuns(HookContract):
    bed_type = ProgramBed


class RememberingBed(ProgramBed):
    """The program is run for `load` only, and what it loaded last is kept in a file."""

    cannot: ClassVar = {
        **dict.fromkeys(("gone", "hung", "restart", "pause"), "there is nobody to ask what the engine runs"),
        "fail_commit": "nothing is run for it",
    }

    def open(self):
        load_and_serve = ["/bin/sh", "-c", 'SYNCD_PHASE=abort exec "$@"', "sh", *self.command]
        return CommandHook(load_and_serve, state=str(self.directory / "state.json"), timeout=self.patience)


class TestProgramWhoseLastLoadIsRemembered(HookContract):
    bed_type = RememberingBed


@pytest.fixture
def scene(tmp_path):
    made = Scene(tmp_path / "job")
    yield made
    made.close()


@pytest.fixture
def target(tmp_path):
    place = tmp_path / "it's $(touch evil) `touch evil` {step}; touch evil"
    write_shards(place, 5)
    return target_of(place, (2, 5))


SAY = 'printf "%s\\n" "$@" > "$OUT"; env | grep ^SYNCD_ | sort >> "$OUT"'


def test_placeholders_and_environment_are_filled_in_without_shell_evaluation(tmp_path, target, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.chdir(tmp_path)
    words = [
        "--from={path}",
        "{generation}/{step}",
        "{label}",
        "{phase}",
        "{kind}",
        '{"a": {"b": 1}}',
        "{{path}}",
    ]
    hook = CommandHook(["/bin/sh", "-c", SAY, "sh", *words])
    load(hook, target)
    said = (tmp_path / "out").read_text().splitlines()
    assert said[:7] == [
        f"--from={target.path}", "2/5", target.label, "load", "weights", '{"a": {"b": 1}}', "{path}",
    ]  # fmt: skip
    assert said[7:] == [
        f"SYNCD_DIGEST={target.version.digest}", "SYNCD_GENERATION=2", "SYNCD_KIND=weights",
        f"SYNCD_LABEL={target.label}",
        f"SYNCD_PATH={target.path}", "SYNCD_PHASE=load", "SYNCD_STEP=5",
    ]  # fmt: skip
    assert not (tmp_path / "evil").exists()


def test_a_program_may_refuse_a_version_in_prepare(target):
    script = '[ $SYNCD_PHASE = prepare ] && { echo "too large for me"; exit 65; }; exit 1'
    hook = CommandHook(["/bin/sh", "-c", script], phases=("prepare", "load"))
    with pytest.raises(RefusedError, match="too large for me"):
        hook.prepare(target)


@pytest.mark.parametrize(
    ("code", "becomes"), [(1, LoadFailedError), (69, EngineUnreachableError), (75, EngineUnreachableError)]
)
def test_exit_codes_distinguish_a_failed_load_from_an_unreachable_engine(target, code, becomes):
    hook = CommandHook(["/bin/sh", "-c", f"echo out; echo because >&2; exit {code}"])
    hook.prepare(target)
    with pytest.raises(becomes, match=f"ended with {code}: because"):
        hook.load(target)


def test_a_failing_rollback_is_a_dead_engine(target):
    hook = CommandHook(["/bin/sh", "-c", "exit 1"])
    with pytest.raises(EngineDeadError) as dead:
        hook.abort(target)
    assert dead.value.hint
    assert hook.current_version() == Running(UNKNOWN_LABEL)


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pid):
    """Wait until a process is gone, for a while that no healthy machine needs."""
    for _ in range(600):
        if not is_alive(pid):
            return True
        time.sleep(0.05)
    return False


def test_a_time_out_kills_the_whole_process_group(tmp_path, target, monkeypatch):
    monkeypatch.setattr(process, "GRACE", 0.2)
    pids = tmp_path / "pids"
    script = f"trap '' TERM; (trap '' TERM; echo $$ >> {pids}; sleep 300) & echo $! >> {pids}; sleep 300"
    found = []
    # A loaded machine may not have started all of the group in the first half second.
    for timeout in (0.5, 2.0, 8.0, 32.0):
        pids.write_text("")
        hook = CommandHook(["/bin/sh", "-c", script], timeout=timeout)
        hook.prepare(target)
        raised = bounded(lambda hook=hook: hook.load(target))
        assert isinstance(raised, LoadFailedError)
        assert f"killed after {timeout:g} s" in str(raised)
        found = [int(line) for line in pids.read_text().split()]
        assert all(ends(pid) for pid in found)
        if len(found) == 2:
            break
    assert len(found) == 2


def test_an_interrupted_load_kills_its_process(tmp_path, target):
    pid_file = tmp_path / "pid"
    script = f"echo $$ > {pid_file}; sleep 0.5; kill -INT {os.getpid()}; exec sleep 300"
    hook = CommandHook(["/bin/sh", "-c", script])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            hook.load(target)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ends(int(pid_file.read_text()))


def test_large_output_is_drained_and_its_end_is_kept():
    finished = run(
        ["/bin/sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x; echo END; echo bad >&2"], {}, 60
    )
    assert finished.code == 0
    assert finished.out.endswith("xEND\n")
    assert len(finished.out) == process.KEPT
    assert finished.err == "bad\n"


def test_endless_output_is_ended_by_the_time_out():
    finished = bounded_run(["/bin/sh", "-c", "exec yes"], 0.5)
    assert finished.code is None
    assert len(finished.out) == process.KEPT


def bounded_run(argv, timeout):
    found = []
    assert bounded(lambda: found.append(run(argv, {}, timeout))) is None
    return found[0]


def test_a_background_child_does_not_delay_the_result(tmp_path):
    pid_file = tmp_path / "pid"
    finished = bounded_run(["/bin/sh", "-c", f"sleep 300 & echo $! > {pid_file}; echo done"], 30)
    pid = int(pid_file.read_text())
    try:
        assert (finished.code, finished.out) == (0, "done\n")
        assert is_alive(pid)
    finally:
        os.kill(pid, 9)


def test_what_a_successful_program_printed_is_shown_on_the_same_stream(target, capfd):
    hook = CommandHook(["/bin/sh", "-c", "echo loaded $0; printf 'a\\033[31mb' >&2", "{label}"])
    hook.load(target)
    assert capfd.readouterr() == (f"loaded {target.label}\n", "a\\x1b[31mb\n")


def test_error_messages_contain_printable_text_only(target):
    hook = CommandHook(["/bin/sh", "-c", r"printf '\033[2Jowned\n\377second line\n' >&2; exit 3"])
    with pytest.raises(LoadFailedError) as failed:
        hook.load(target)
    assert "owned" in str(failed.value)
    assert str(failed.value).isprintable()
    assert len(str(failed.value)) < 2000


def test_a_load_leaves_no_file_descriptor_open(target):
    hook = CommandHook(["true"])
    before = held()
    load(hook, target)
    assert held() <= before


@pytest.mark.parametrize(
    ("said", "means"),
    [
        ("", Running(None)),
        ("-", Running(None)),
        ("1.5\n", Running("1.5")),
        ("1.5 paused", Running("1.5", paused=True)),
        ("- paused\n", Running(None, paused=True)),
        ("base-model", Running("base-model")),
    ],
)
def test_the_output_of_current_is_parsed(said, means):
    hook = CommandHook(["true"], current=["printf", "%s", said])
    assert hook.current_version() == means


def test_the_state_file_counts_only_after_a_committed_load(tmp_path, target):
    state = tmp_path / "state.json"
    hook = CommandHook(["true"], state=str(state))
    load(hook, target)
    assert json.loads(state.read_text())["label"] == label(5, 2)
    assert CommandHook(["true"], state=str(state)).current_version() == Running(label(5, 2))
    hook.prepare(target)
    hook.load(target)
    assert CommandHook(["true"], state=str(state)).current_version() == Running(UNKNOWN_LABEL)
    for content in ("", "[]", '{"label": 7}', '{"protocol": 1, "label": null}', "\x00"):
        state.write_text(content)
        assert CommandHook(["true"], state=str(state)).current_version() == Running(UNKNOWN_LABEL)
    state.unlink()
    assert CommandHook(["true"], state=str(state)).current_version() == Running(None)


def test_a_state_file_that_cannot_be_written_leaves_the_engine_alone_and_blames_no_version(scene, tmp_path):
    place, phases = tmp_path / "place", tmp_path / "phases"
    place.mkdir()
    program = [
        "/bin/sh",
        "-c",
        f'echo $SYNCD_PHASE $SYNCD_STEP >> {phases}; [ "$SYNCD_STEP" != 3 ] || rm -r {place}',
    ]
    follower = scene.follow(hook=CommandHook(program, state=str(place / "state")))
    scene.publish(1)
    assert follower.turn(timeout=60).kind == "applied"
    place.rename(tmp_path / "away")
    scene.publish(2)
    outcome = follower.turn(timeout=0)
    assert (outcome.kind, outcome.pair, follower.applied) == ("failed", (1, 2), (1, 1)), outcome
    assert str(place) in outcome.reason
    assert phases.read_text() == "load 1\n"
    (tmp_path / "away").rename(place)
    assert follower.turn(timeout=60).pair == follower.applied == (1, 2)
    scene.publish(3)  # while it is loaded, the file's directory goes away
    assert follower.turn(timeout=60).pair == follower.applied == (1, 3)
    assert phases.read_text() == "load 1\nload 2\nload 3\n"


@pytest.mark.parametrize("full", ["stdout", "stderr"])
def test_a_full_disk_of_the_log_ends_no_follower_and_fails_no_load(scene, full):
    scene.publish(1)
    command = [sys.executable, "-m", "syncd", "follow", scene.root, "--hook", "command", "--once"]
    with open("/dev/full", "w") as log:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, full: log}
        done = subprocess.run([*command, "--", "echo", "loaded"], **streams, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "version_applied" in done.stderr if full == "stdout" else "loaded" in done.stdout


def test_a_timeout_of_no_seconds_is_a_usage_error(scene):
    command = [sys.executable, "-m", "syncd", "follow", scene.root, "--hook", "command", "--once"]
    done = subprocess.run(
        [*command, "--timeout", "0", "--", "true"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "--timeout" in done.stderr


def test_what_a_program_prints_is_not_among_the_json_of_the_results(scene):
    scene.publish(1)
    command = [sys.executable, "-m", "syncd", "follow", scene.root, "--hook", "command", "--once", "--json"]
    done = subprocess.run([*command, "--", "echo", "loaded"], capture_output=True, text=True, check=True)
    (result,) = map(json.loads, done.stdout.splitlines())
    assert (result["kind"], result["step"]) == ("applied", 1)
    assert "loaded\n" in done.stderr


def test_a_command_can_be_given_as_arguments_or_as_one_address(target, tmp_path):
    for options in (
        HookOptions(
            argv=("/bin/sh", "-c", "exit 0"), settings={"current": "echo '4.4'", "phases": "load,commit"}
        ),
        HookOptions(address="/bin/sh -c 'exit 0'", settings={"state": str(tmp_path / "state")}),
    ):
        hook = CommandHook.from_options(options)
        load(hook, target)
        assert hook.current_version().label == ("4.4" if "current" in options.settings else label(5, 2))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (HookOptions(), "needs a command"),
        (HookOptions(argv=("no-such-program-here",)), "no-such-program-here"),
        (HookOptions(argv=("true", "{pth}")), "{pth}"),
        (HookOptions(address="echo 'unended"), "not a command"),
        (HookOptions(argv=("true",), settings={"phases": "launch"}), "launch"),
        (HookOptions(argv=("true",), settings={"curent": "x"}), "curent"),
        (HookOptions(argv=("true",), settings={"current": "no-such-program-here"}), "no-such-program-here"),
    ],
)
def test_wrong_options_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        CommandHook.from_options(options)


def test_a_path_that_looks_like_an_option_is_refused(tmp_path, monkeypatch):
    out = tmp_path / "out"
    version = Version(1, 5, "remote", "--evil=1", "sha256:00")
    hook = CommandHook(["/bin/sh", "-c", f'echo "$@" > {out}', "sh", "--from={path}", "{path}"])
    with pytest.raises(RefusedError, match="--evil"):
        hook.prepare(WeightDirectory(version, "--evil=1"))
    assert not out.exists()
    harmless = CommandHook(["/bin/sh", "-c", f'echo "$@" > {out}', "sh", "--from={path}"])
    load(harmless, WeightDirectory(version, "--evil=1"))
    assert out.read_text() == "--from=--evil=1\n"
