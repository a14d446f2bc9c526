"""Weights of a GPU through files and memory: saved, loaded, copied as training state. `make test-gpu`."""

import pytest

torch = pytest.importorskip("torch", reason="the trainer needs torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)

from support.saving import load, log_probs, new_job, tiny, whole  # noqa: E402
from support.targets import target_of  # noqa: E402

from explorer_hooks.hooks.transformers import TransformersHook  # noqa: E402
from syncd.errors import NonFiniteError  # noqa: E402
from syncd.transports.files import fill_tensors, read_file  # noqa: E402
from syncd.transports.files.buffers import PinnedBuffer  # noqa: E402
from syncd.transports.files.step_saver import StepSaver  # noqa: E402
from syncd.transports.host_memory import HostMemory  # noqa: E402
from syncd.transports.torch_tensors import target_tensors  # noqa: E402
from trainer.engines.state_copy import StateBuffer  # noqa: E402

GPU = torch.device("cuda")
MODES = ("background", "stream")
LARGE = 9 << 20  # elements: more than one piece of a file, and slower to copy than the call that begins it


@pytest.fixture
def job(tmp_path):
    return new_job(tmp_path / "job")


@pytest.fixture(params=MODES)
def saver(request, job):
    made = StepSaver(job, 0, 1, mode=request.param, dtype=None)
    yield made
    made.close()


def odd_tensors():
    """Return tensors of all kinds of layout, in main memory."""
    made = torch.Generator().manual_seed(1)
    return {
        "large": torch.randn(LARGE, generator=made),
        "brain": torch.randn(3, 11, generator=made).bfloat16(),
        "turned": torch.randn(600, 1000, generator=made).t(),
        "part": torch.randn(8, 1000, generator=made)[2:5],
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "flag": torch.tensor([True, False, True]),
        "count": torch.tensor([7], dtype=torch.int64),
        "byte": torch.arange(5, dtype=torch.uint8),
    }


def on_gpu(tensors):
    return {name: tensor.to(GPU) for name, tensor in tensors.items()}


def save(saver, step, tensors):
    saver.save(step, f"attempt-{step}", tensors, None)


def save_and_wait(saver, step, tensors):
    save(saver, step, list(tensors.items()))
    saver.wait()


def test_a_step_saved_from_a_gpu_has_the_bytes_of_one_saved_from_main_memory(job, saver):
    digests = set()
    for step, tensors in enumerate((odd_tensors(), on_gpu(odd_tensors()), on_gpu(odd_tensors()))):
        save_and_wait(saver, step, tensors)
        digests.add(whole(job, step).shards[0].digest)
    assert len(digests) == 1


def test_training_may_change_weights_as_soon_as_a_save_returns(job, saver):
    """Steps of training come before the copies have ended where a save does not wait for them."""
    weights = on_gpu({"w": torch.zeros(LARGE), "v": torch.zeros(LARGE)})
    for step in range(4):
        save(saver, step, list(weights.items()))
        for tensor in weights.values():
            tensor.add_(1.0)
    saver.wait()
    for step in range(4):
        assert {tensor.unique().item() for tensor in load(job, step).values()} == {step}


def test_a_cast_on_a_gpu_is_that_of_main_memory(job):
    weight = torch.randn(1100, 1013)
    saver = StepSaver(job, 0, 1, dtype=torch.bfloat16)
    save(saver, 0, [("w", weight.to(GPU))])
    saver.close()
    assert torch.equal(load(job, 0)["w"], weight.bfloat16())


def test_memory_prepared_for_a_model_on_a_gpu_is_used_by_its_first_save(job):
    tensors = on_gpu({f"w{number}": torch.randn(300_001) for number in range(8)})
    saver = StepSaver(job, 0, 1, dtype=None)
    saver.prepare(tensors.items())
    buffer = saver._buffers.next()
    address = buffer.bytes.data_ptr()
    assert buffer.bytes.is_pinned()
    save_and_wait(saver, 0, tensors)
    assert saver._buffers.next().bytes.data_ptr() == address
    assert torch.equal(load(job, 0)["w7"], tensors["w7"].cpu())
    saver.close()


def test_memory_of_a_dropped_buffer_is_pinned_no_more():
    buffer = PinnedBuffer(LARGE, pinned=True)
    piece = buffer.piece(0, torch.uint8, torch.Size([LARGE]))
    assert piece.is_pinned()
    del buffer
    assert not piece.is_pinned()


def test_memory_that_cuda_refuses_to_pin_leaves_no_error_for_the_next_kernel():
    buffer = PinnedBuffer(LARGE, pinned=True)
    buffer._pin()  # it is pinned already
    assert float(torch.ones(1000, device=GPU).sum()) == 1000.0
    buffer.close()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_weights_of_a_gpu_are_refused_by_name(job, saver, bad):
    tensors = on_gpu({"good": torch.ones(LARGE), "bad": torch.ones(LARGE)})
    tensors["bad"][LARGE // 2] = bad
    with pytest.raises(NonFiniteError, match="bad"):
        save_and_wait(saver, 0, tensors)


@pytest.fixture(params=["cached", "direct"])
def way(request, monkeypatch):
    """Have files read through the page cache, or past it where that is possible."""
    monkeypatch.setattr(read_file, "cached_share", lambda *_: 1.0 if request.param == "cached" else 0.0)


def saved(job, tensors, *, verified=False):
    """Return what a follower loads from: a step with these tensors."""
    saver = StepSaver(job, 0, 1, dtype=None)
    save(saver, 1, list(tensors.items()))
    saver.close()
    return target_of(f"{job.step(1)}/actor", (1, 1), verified=verified)


def filled(target, tensors):
    targets = target_tensors(tensors)
    return fill_tensors.load(target, targets, fill_tensors.check_fit(target, targets))


@pytest.mark.usefixtures("way")
def test_tensors_on_a_gpu_are_filled_with_the_bytes_of_files(job):
    tensors = odd_tensors()
    target = saved(job, tensors)
    found = {name: torch.zeros_like(tensor, device=GPU) for name, tensor in tensors.items()}
    filled(target, found)
    for name, tensor in tensors.items():
        assert torch.equal(found[name].cpu(), tensor), name


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_tensors_on_a_gpu_of_another_dtype_are_cast(job, dtype):
    weight = torch.randn(1100, 1013)
    found = {"w": torch.zeros(weight.shape, dtype=dtype, device=GPU)}
    filled(saved(job, {"w": weight}), found)
    assert torch.equal(found["w"].cpu(), weight.to(dtype))


def test_a_model_on_a_gpu_answers_as_the_version_that_its_hook_loaded(job):
    pytest.importorskip("transformers", reason="needs transformers")
    model, wanted = tiny().to(GPU), tiny()
    with torch.no_grad():
        for parameter in wanted.parameters():
            parameter.mul_(1.5)
    target = saved(job, wanted.state_dict())
    hook = TransformersHook(model, timeout=30.0)
    hook.prepare(target)
    hook.load(target)
    hook.commit(target)
    assert all(
        torch.equal(tensor.cpu(), wanted.state_dict()[name]) for name, tensor in model.state_dict().items()
    )
    with torch.device(GPU):
        answers = log_probs(model)
    assert (answers.cpu() - log_probs(wanted)).abs().max() < 1e-4


def test_a_captured_training_state_is_that_before_the_next_step(tmp_path):
    parameter = torch.zeros(LARGE, device=GPU)
    state = {"state.pt": {"momentum": parameter, "step": 3, "small": torch.ones(7, device=GPU)}}
    buffer = StateBuffer(HostMemory(1 << 30))
    buffer.prepare(state)
    for number in range(3):
        captured = buffer.capture(state)
        parameter.add_(1.0)
        assert not captured.live
        (tmp_path / f"{number}").mkdir()
        captured.write(f"{tmp_path}/{number}")
        found = torch.load(tmp_path / f"{number}" / "state.pt")
        assert found["momentum"].device.type == "cpu"
        assert found["momentum"].unique().item() == number
        assert (found["step"], found["small"].tolist()) == (3, [1.0] * 7)
    buffer.close()
