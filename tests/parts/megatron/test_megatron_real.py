"""The strategy `megatron`: verl's engine and megatron-core themselves, on two processors, against plain torch.

Layers are those of core's local spec (`support/megatron_on_cpu.py`). It has an environment: `make test-megatron`.
"""

import importlib.util
import math

import pytest
from support import samples
from support.megatron_step import expected_step

torch = pytest.importorskip("torch", reason="the trainer needs torch")
for package in ("megatron", "mbridge"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-megatron", allow_module_level=True)

from safetensors.torch import load_file  # noqa: E402
from support import case_runs  # noqa: E402

from trainer.parts.megatron.export import MegatronFiles  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LAYOUTS = ("tensor", "pipeline", "data")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    found = tmp_path_factory.mktemp("megatron")
    samples.make_model(found / "even", tied=False, tokenizer=True, vocab=64)
    samples.make_model(found / "even-tied", tied=True, tokenizer=True, vocab=64)
    return found


@pytest.fixture(scope="module")
def found(place):
    names = ("layouts", "other_layout", "settings", "job", "reference", "planted")
    return case_runs.run_cases(place, "verl", place, 2, *(f"megatron_{name}" for name in names))


@pytest.fixture(scope="module")
def layouts(found):
    return found["megatron_layouts"]


@pytest.fixture(scope="module")
def stepped(place):
    """Return what plain torch makes of the first step."""
    return expected_step(place / "even", samples.batch_of(1))


def test_no_object_in_any_file_of_a_full_checkpoint_is_run(found):
    for rank in found["megatron_planted"]:
        assert rank["ran"] == []
        assert rank["whole"] is None, "it resumes once the file is as it was"
        state = {place: why for place, why in rank["outcomes"].items() if place[0].startswith("training/")}
        read = [
            why for (name, _), why in state.items() if not name.endswith(("contents.json", "config.json"))
        ]
        assert len(read) > 60
        assert all(why[0] == "CorruptDataError" for why in read)
        for name in ("model/dist_ckpt/.metadata", "optimizer/dist_ckpt/common.pt"):
            how = "pickle" if name.endswith("metadata") else "saved"
            assert "running code" in state[f"training/{name}", how][1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_go_out_by_their_hugging_face_names_and_unchanged(layouts, place, layout):
    expected = load_file(place / "even/model.safetensors")
    for rank in layouts:
        start = rank[layout]["start"]
        assert start.keys() == expected.keys()
        assert all(torch.equal(start[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_are_those_of_transformers_on_all_ranks(layouts, place, layout):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(place / "even", dtype=torch.float32)
    for number, row in enumerate(samples.batch_of(9).experiences):
        tokens = torch.tensor([list(row.tokens)])
        with torch.no_grad():
            whole = model(tokens).logits[0, :-1].log_softmax(-1)
        expected = whole.gather(1, tokens[0, 1:, None])[:, 0]
        for rank in layouts:
            assert rank[layout]["tokens"][number] == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_of_grpo_equals_plain_torch(layouts, stepped, layout):
    for rank in layouts:
        found = rank[layout]
        assert found["metrics"][0]["actor/grad_norm"] == pytest.approx(stepped.norm, rel=1e-4)
        assert found["metrics"][0]["actor/pg_loss"] == pytest.approx(stepped.loss, abs=1e-5)
        for name, tensor in stepped.weights.items():
            torch.testing.assert_close(found["after"][name], tensor, rtol=1e-4, atol=1e-4, msg=name)


def test_metrics_are_the_same_in_every_layout_and_on_every_rank(layouts):
    usual = layouts[0]["data"]["metrics"]
    for rank in layouts:
        for layout in LAYOUTS:
            for metrics, expected in zip(rank[layout]["metrics"], usual, strict=True):
                assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resume_goes_on_bit_for_bit(layouts, layout):
    for rank in layouts:
        found = rank[layout]
        assert found["again"] == found["metrics"][2:]
        assert all(torch.equal(found["end"][name], tensor) for name, tensor in found["end again"].items())
        assert all(found["same state"].values()), found["same state"]


def test_every_rank_writes_what_it_owns(layouts):
    assert {".metadata", "common.pt", "metadata.json"} <= set(layouts[0]["tensor"]["files"])
    for rank in (0, 1):
        assert any(name.startswith(f"__{rank}_") for name in layouts[0]["tensor"]["files"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_of_a_training_state_are_read_without_megatron(layouts, place, layout):
    found = MegatronFiles(f"{place}/{layout}-saved/model/dist_ckpt", f"{place}/even/config.json")
    expected = layouts[0][layout]["saved"]
    assert found.kinds.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tuple(tensor.shape) == found.kinds[name].shape
        assert torch.equal(found.read(name), tensor), name


def test_a_state_of_another_layout_or_with_a_part_lost_is_refused_on_all_ranks(found):
    for rank in found["megatron_other_layout"]:
        kind, text, hint = rank["pipeline"]
        assert kind == "ConfigError"
        assert "it was written with" in text
        assert "trainer export" in hint
        assert rank["cut"][0] == "CorruptDataError"


def test_rates_warm_up_and_a_resume_takes_the_settings_of_the_file(found):
    for rank in found["megatron_settings"]:
        rates = rank["rates"]
        assert rates[:3] == pytest.approx([0.0, 5e-3, 1e-2])
        assert rates[3] == pytest.approx(1e-2 * 0.5 * (1 + math.cos(math.pi / 7)))
        assert rank["betas"] == {(0.8, 0.95)}
        assert rank["now"] == {(0.7, 0.9)}
        assert rank["changed"] == pytest.approx(2e-2 * 0.5 * (1 + math.cos(2 * math.pi / 7)))


def test_a_job_publishes_resumes_and_skips_an_update_that_is_not_finite(found, place):
    for rank in found["megatron_job"]:
        assert rank["huge"]["actor/updates_skipped"] == 1
        assert rank["kept"]
        assert math.isfinite(rank["later"]["actor/grad_norm"])
        assert (rank["resumed"], rank["same end"], rank["step"]) == (True, True, 2)


def test_tied_weights_are_published_once_from_a_pipeline(found, place):
    expected = load_file(place / "even-tied/model.safetensors")
    for rank in found["megatron_reference"]:
        assert sorted(rank["names"]) == sorted(expected)
        assert rank["metrics"][0]["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
        assert rank["metrics"][1]["actor/kl_loss"] > 1e-6
