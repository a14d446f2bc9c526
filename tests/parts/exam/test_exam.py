"""The exam: a kind of tensor that an engine does not load is found before it gets work, in whichever dtype."""

import copy
import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

from support import paths  # noqa: E402
from support.engine_models import MODELS, model_of  # noqa: E402
from support.followers import Scene  # noqa: E402
from support.matrices import rows  # noqa: E402
from support.proven import probe_of, write_version  # noqa: E402

from explorer_hooks.hook import ProbeAnswer  # noqa: E402
from explorer_hooks.hooks.transformers import TransformersHook  # noqa: E402
from explorer_hooks.parts.exam import files as exams  # noqa: E402
from explorer_hooks.parts.exam.exam import TIED, noise_of  # noqa: E402
from explorer_hooks.parts.exam.files import ExamFiles, Subject  # noqa: E402
from explorer_hooks.parts.exam.model import changed_tensor  # noqa: E402
from explorer_hooks.proof.start_model import target_of  # noqa: E402
from syncd.errors import LoadFailedError  # noqa: E402
from syncd.protocol.engine_state import EngineState, engine_report_of  # noqa: E402
from syncd.protocol.file_lock import lock_file  # noqa: E402
from syncd.protocol.probe import write_base_probe  # noqa: E402

LONG = 60.0
BESIDE = ("config.json", "generation_config.json")
ARCHITECTURES = ["Llama, untied", "Qwen2, untied", "Qwen3, tied", "Qwen3-MoE", "Gemma3, tied"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Stale(TransformersHook):
    """Loads as the real hook does, but leaves some tensors as the start model has them."""

    names = ()
    head = None
    is_fused = False
    """Whether its tensors have other names than those in files, so that transformers reads them."""

    def load(self, target):
        old = {name: tensor.clone() for name, tensor in self.model.state_dict().items() if name in self.names}
        if self.is_fused:
            read = type(self.model).from_pretrained(target.path, dtype=self.model.dtype)
            self.model.load_state_dict(read.state_dict())
        else:
            super().load(target)
        with torch.no_grad():
            for name, tensor in old.items():
                self.model.state_dict()[name].copy_(tensor)

    def reload_start(self):
        if not self.is_fused:
            return super().reload_start()
        self.load(target_of(self.start_directory()))
        return True

    def probe(self, target, tokens):
        if self.head is None:
            return super().probe(target, tokens)
        layer = self.model.get_output_embeddings()
        tied, layer.weight = layer.weight, torch.nn.Parameter(self.head)
        try:
            return super().probe(target, tokens)
        finally:
            layer.weight = tied


def engine_of(place, name, dtype):
    """Return an engine on a start model that lies in a directory, and its weights."""
    start = f"{place}/start"
    model_of(name, 0).to(DTYPES[dtype]).save_pretrained(start)
    model = transformers.AutoModelForCausalLM.from_pretrained(start, dtype=DTYPES[dtype]).eval()
    return Stale(model)


def kinds_of(model):
    kinds = {}
    for name, _ in model.named_parameters():
        kinds.setdefault(".".join("*" if part.isdigit() else part for part in name.split(".")), []).append(
            name
        )
    return kinds


def path_of(making):
    """Return the path of the copy that a directory becomes once it is made."""
    return os.path.join(os.path.dirname(making), os.path.basename(making).partition(".")[0])


@pytest.fixture
def scene(tmp_path):
    made = Scene(tmp_path / "job")
    yield made
    made.close()


CASES = [(name, dtype) for name in ARCHITECTURES for dtype in DTYPES]
"""`make test-exam` runs all of them, and writes the table of docs/proof.md."""


def keep_row(**row):
    if path := os.environ.get("SYNCD_EXAM_ROWS"):
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), rows(CASES, ("Qwen3, tied", "bfloat16"), ("Qwen3-MoE", "bfloat16"))
)
def test_every_kind_of_tensor_that_stays_is_named_but_those_listed_as_unseen(
    tmp_path, scene, name, dtype, record_line
):
    hook = engine_of(tmp_path, name, dtype)
    hook.is_fused = "MoE" in name
    with ExamFiles(scene.job).opened(Subject(hook.start_directory()), dtype, None) as (exam, changed):
        start = hook.probe(None, exam.start.tokens)
        mean = max(abs(a - b) for row, other in zip(start.logprobs, exam.start.logprobs, strict=True)
                   for a, b in zip(row, other, strict=True))  # fmt: skip
        noise = noise_of(mean, dtype)
        cases = dict(kinds_of(hook.model))
        if "tied" in name and "untied" not in name:
            cases[TIED] = []
        missed, misnamed = [], []
        for kind, names in cases.items():
            hook.names = names
            hook.head = hook.model.get_output_embeddings().weight.detach().clone() if kind == TIED else None
            hook.load(changed)
            problem = exam.problem(hook.probe(changed, exam.start.tokens), noise)
            if not problem:
                missed.append(kind)
            elif not problem.startswith(kind):
                misnamed.append(kind)
            hook.names, hook.head = (), None
            hook.reload_start()
        hook.load(changed)
        assert exam.problem(hook.probe(changed, exam.start.tokens), noise) == ""
        hook.reload_start()
        assert hook.probe(None, exam.start.tokens) == start
        unseen, least = exam.unseen(noise), min(exam.distances().values())
    named = len(cases) - len(missed) - len(misnamed)
    keep_row(model=name, dtype=dtype, kinds=len(cases), named=named, unseen=unseen, least=least)
    record_line(
        f"{name}, {dtype}: {len(cases)} kinds, unseen {unseen}, missed {missed}, not named {misnamed}"
    )
    assert set(missed) <= set(unseen)
    assert misnamed == []
    assert unseen == ()


def test_an_engine_that_cannot_load_the_files_of_its_start_model_is_not_examined(tmp_path, scene):
    follow(scene, engine_of(tmp_path, "Qwen3-MoE", "float32"))
    assert "does not fit the model" in report(scene).exam
    assert report(scene).state is EngineState.WAITING


def follow(scene, hook, **options):
    return scene.follow("e0", hook, retries=0, **options)


def report(scene):
    return engine_report_of(scene.presence().info)


@pytest.mark.parametrize("baseline", [True, False])
def test_an_engine_that_loads_everything_passes_and_is_back_on_its_start_weights(tmp_path, scene, baseline):
    hook = engine_of(tmp_path, "Qwen3, tied", "bfloat16")
    before = {name: tensor.clone() for name, tensor in hook.model.state_dict().items()}
    if baseline:
        write_base_probe(scene.job, probe_of(hook.model, "bfloat16"), "start")
    follower = follow(scene, hook)
    assert (report(scene).exam, report(scene).unseen, report(scene).state) == (
        "passed",
        (),
        EngineState.WAITING,
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in hook.model.state_dict().items())
    told = dict(scene.told)
    assert told["engine_examined"]["bytes"] > 0
    assert told["engine_examined"]["seconds"] >= 0
    assert scene.names().count("reload_tested") == 1
    assert (
        "engine_calibrated" in scene.names()
    ) is baseline  # transformers' answers say nothing of the trainer's
    assert follower.may_work()
    assert [name for name in os.listdir(scene.job.exams) if not name.endswith(".json")] == []
    model = copy.deepcopy(hook.model)
    model.load_state_dict(model_of("Qwen3, tied", 1).to(torch.bfloat16).state_dict())
    write_version(scene.job, 1, model, probe_of(model, "bfloat16"))
    scene.tick()
    outcome = follower.turn(timeout=LONG)
    assert outcome.kind == "applied", outcome.reason
    assert report(scene).state is EngineState.PROVEN


def test_the_first_version_after_an_exam_may_have_another_dtype_than_the_start_model(tmp_path, scene):
    follower = follow(scene, engine_of(tmp_path, "Qwen3, tied", "float32"))
    assert report(scene).exam == "passed"
    model = model_of("Qwen3, tied", 1).to(torch.bfloat16)
    write_version(scene.job, 1, model, probe_of(model, "bfloat16"))
    scene.tick()
    outcome = follower.turn(timeout=LONG)
    assert outcome.kind == "applied", outcome.reason


def test_the_proof_of_a_load_takes_one_forward_pass_whatever_the_lengths_of_its_rows(tmp_path, scene):
    hook, passes = engine_of(tmp_path, "Qwen3, tied", "float32"), []
    follower = follow(scene, hook, exam="off")
    hook.model.register_forward_hook(lambda *_: passes.append(1))
    model = model_of("Qwen3, tied", 1)
    write_version(scene.job, 1, model, probe_of(model, rows=[list(range(3, 19)), [7, 8, 9], [5, 6]]))
    scene.tick()
    outcome = follower.turn(timeout=LONG)
    assert outcome.kind == "applied", outcome.reason
    assert (report(scene).proof.tokens, len(passes)) == (15 + 2 + 1, 1)
    assert report(scene).proof.worst < 1e-5


@pytest.mark.fault("an engine's way of loading does not reach a tensor, whose change no version shows")
def test_an_engine_that_leaves_a_part_out_gets_no_work_and_no_version_until_it_is_started_again(
    tmp_path, scene
):
    hook = engine_of(tmp_path, "Qwen3, tied", "bfloat16")
    hook.head = hook.model.get_output_embeddings().weight.detach().clone()
    follower = follow(scene, hook)
    found = report(scene)
    assert (found.exam, found.state, found.ready) == ("failed", EngineState.WRONG, False)
    assert TIED in found.reason
    assert "reload=restart" in dict(scene.told)["exam_failed"]["hint"]
    model = model_of("Qwen3, tied", 1).to(torch.bfloat16)
    write_version(scene.job, 1, model, probe_of(model, "bfloat16"))
    scene.tick()
    assert follower.turn(timeout=0.5).kind == "nothing"
    assert not follower.may_work()
    assert report(scene).given_up == ()  # the version is as good as any


def test_nobody_is_answered_while_an_engine_is_examined(tmp_path, scene):
    hook, seen = engine_of(tmp_path, "Qwen2, untied", "float32"), []
    answer = hook.probe

    def watched(target, tokens):
        if target is not None:
            seen.append((hook.current_version().paused, report(scene).state, report(scene).ready))
        return answer(target, tokens)

    hook.probe = watched
    follow(scene, hook)
    assert seen == [(True, EngineState.LOADING, False)]


@pytest.mark.parametrize("why", ["off", "no directory", "no room"])
def test_an_engine_that_is_not_examined_says_so(tmp_path, scene, why, monkeypatch):
    hook = engine_of(tmp_path, "Qwen2, untied", "float32")
    if why == "no directory":
        hook.model.config._name_or_path = ""
    if why == "no room":
        monkeypatch.setattr(exams, "ROOM", 1e12)
    follow(scene, hook, exam="off" if why == "off" else "auto")
    words = {"off": "off", "no directory": "cannot be read again", "no room": "are free"}
    assert words[why] in report(scene).exam
    assert ("exam_left_out" in scene.names()) is (why != "off")


def test_an_exam_whose_copy_another_host_has_removed_says_nothing(tmp_path, scene):
    """Where locks do not reach other hosts, one of them may take a copy for unused."""
    hook = engine_of(tmp_path, "Qwen2, untied", "float32")
    load = hook.load

    def robbed(target):
        load(target)
        shutil.rmtree(target.path)
        raise LoadFailedError("a file is missing")

    hook.load = robbed
    follow(scene, hook)
    assert "was removed while it was loaded" in report(scene).exam
    assert report(scene).state is EngineState.WAITING


def test_two_hosts_that_make_an_exam_at_once_have_the_same(tmp_path, scene, monkeypatch):
    hook = engine_of(tmp_path, "Qwen2, untied", "float32")
    subject, run = Subject(hook.start_directory()), exams._run
    monkeypatch.setattr(
        exams, "_lock", lambda path: exams.lock_file(f"{path}.{id(object())}", exclusive=True)
    )

    def both(asked, target, dtype, rows):
        document = run(asked, target, dtype, rows)
        shutil.copytree(target, path_of(target))
        return document

    monkeypatch.setattr(exams, "_run", both)
    with ExamFiles(scene.job).opened(subject, "float32", None) as (exam, changed):
        hook.load(changed)
        assert exam.problem(hook.probe(changed, exam.start.tokens), 1e-5) == ""
    assert [name for name in os.listdir(scene.job.exams) if name.endswith(".tmp")] == []


def test_what_fails_while_an_exam_is_open_is_not_taken_for_one_that_cannot_be_made(tmp_path, scene):
    files, start = ExamFiles(scene.job), engine_of(tmp_path, "Qwen2, untied", "float32").start_directory()
    with pytest.raises(OSError, match="the engine's own"), files.opened(Subject(start), "float32", None):
        raise OSError("the engine's own")


def test_an_exam_that_cannot_be_written_is_left_out(tmp_path, scene):
    """The file system shows room and refuses the bytes, as with a quota."""
    hook = engine_of(tmp_path, "Qwen2, untied", "float32")
    least = max(os.path.getsize(f"{hook.start_directory()}/{name}") for name in BESIDE)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * least, limits[1]))
    try:
        follow(scene, hook)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "no exam can be made" in report(scene).exam
    assert report(scene).state is EngineState.WAITING


def test_an_exam_that_fails_beside_the_copy_of_another_host_is_left_out(tmp_path, scene, monkeypatch):
    start = engine_of(tmp_path, "Qwen2, untied", "float32").start_directory()

    def refused(_subject, target, *_asked):
        os.makedirs(path_of(target))
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(exams, "_run", refused)
    with pytest.raises(LoadFailedError, match="quota"):
        ExamFiles(scene.job).opened(Subject(start), "float32", None).__enter__()


KILLED = """
import os, sys, time
from explorer_hooks.parts.exam import files
from syncd.protocol.layout import Job

def run(subject, target, *asked):
    os.makedirs(target)
    print("writing", flush=True)
    time.sleep(600)

files._run = run
files.ExamFiles(Job.at(sys.argv[1])).opened(files.Subject(sys.argv[2]), "float32", None).__enter__()
"""


def test_what_killed_makers_left_is_removed_before_an_exam_is_made(tmp_path, scene, monkeypatch):
    start, run, seen = engine_of(tmp_path, "Qwen2, untied", "float32").start_directory(), exams._run, []
    for _ in range(2):
        command = [sys.executable, "-c", KILLED, scene.root, start]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=paths.ROOT) as maker:
            assert maker.stdout.readline() == b"writing\n"
            maker.kill()
    (left,) = (name for name in os.listdir(scene.job.exams) if name.endswith(".tmp"))
    key = left.partition(".")[0]
    # Locks may not reach another host, which makes the same one now, or was killed long ago.
    others = {f"{key}.other.1.tmp": 0.0, f"{key}.other.2.tmp": exams.LONGEST, "f00.x.tmp": exams.LONGEST}
    for name, age in others.items():
        os.mkdir(f"{scene.job.exams}/{name}")
        os.utime(f"{scene.job.exams}/{name}", (time.time() - age - 60,) * 2)

    def watched(*asked):
        seen.extend(name for name in os.listdir(scene.job.exams) if name.endswith(".tmp"))
        return run(*asked)

    monkeypatch.setattr(exams, "_run", watched)
    with ExamFiles(scene.job).opened(Subject(start), "float32", None):
        assert seen == [f"{key}.other.1.tmp"]


def test_the_exam_is_made_once_for_all(tmp_path, scene, monkeypatch):
    hook = engine_of(tmp_path, "Qwen2, untied", "float32")
    files, made = ExamFiles(scene.job), []
    run = exams._run
    monkeypatch.setattr(exams, "_run", lambda *asked: made.append(asked) or run(*asked))
    with files.opened(Subject(hook.start_directory()), "float32", None) as (one, changed):
        with ExamFiles(scene.job).opened(Subject(hook.start_directory()), "float32", None) as (other, same):
            assert (one, changed.path) == (other, same.path)
        assert os.path.isdir(changed.path)
    assert len(made) == 1
    assert not os.path.isdir(changed.path)


def test_an_exam_that_is_not_made_in_time_is_left_out(tmp_path, scene, monkeypatch):
    monkeypatch.setattr(exams, "LONGEST", 0.2)
    files, start = ExamFiles(scene.job), engine_of(tmp_path, "Qwen2, untied", "float32").start_directory()
    os.makedirs(scene.job.exams)
    monkeypatch.setattr(exams, "_key", lambda *asked: "one")
    claim = lock_file(f"{scene.job.exams}/one.lock", exclusive=True)
    with pytest.raises(LoadFailedError, match="another process has made this exam"):
        files.opened(Subject(start), "float32", None).__enter__()
    claim.close()
    monkeypatch.setattr(exams, "sys", SimpleNamespace(modules={}, executable=sys.executable))
    with pytest.raises(LoadFailedError, match="was made in"):
        files.opened(Subject(start), "float32", None).__enter__()
    assert not os.path.isdir(f"{scene.job.exams}/one")


def test_an_exam_of_tensors_that_are_no_ordinary_numbers_cannot_be_made():
    with pytest.raises(ValueError, match=r"scale is of dtype torch\.float8"):
        changed_tensor("scale", torch.ones(2).to(torch.float8_e4m3fn))


@pytest.mark.parametrize("tensor", [torch.ones(6), torch.zeros(6), torch.zeros(4, 3), torch.randn(2, 3, 4)])
def test_every_value_of_a_tensor_moves_and_not_all_by_one_factor(tensor):
    for dtype in DTYPES.values():
        old = tensor.to(dtype)
        new = changed_tensor("a", old)
        assert bool((new != old).all())
        assert torch.equal(new, changed_tensor("a", old))
        moved = (new - old).sign()
        assert moved.unique().numel() == 2


@pytest.mark.slow
def test_the_other_process_makes_the_same(tmp_path):
    hook = engine_of(tmp_path, "Qwen2, untied", "float32")
    command = [
        sys.executable,
        "-m",
        "explorer_hooks.parts.exam.model",
        hook.start_directory(),
        f"{tmp_path}/copy",
    ]
    done = subprocess.run(
        [*command, "float32"], input="[[1, 2, 3]]", capture_output=True, text=True, check=True
    )
    assert '"kinds"' in done.stdout
    before = hook.probe(None, [[1, 2, 3]])
    hook.load(target_of(f"{tmp_path}/copy"))
    assert hook.probe(None, [[1, 2, 3]]) != before


def test_an_answer_that_is_no_number_fails(tmp_path, scene):
    hook = engine_of(tmp_path, "Qwen2, untied", "float32")
    with ExamFiles(scene.job).opened(Subject(hook.start_directory()), "float32", None) as (exam, _):
        rows = [[float("nan")] * len(row) for row in exam.start.logprobs]
        assert exam.problem(ProbeAnswer(tuple(map(tuple, rows))), 1e-5) != ""
        assert exam.problem(ProbeAnswer(()), 1e-5) != ""
    assert set(MODELS) >= set(ARCHITECTURES)
