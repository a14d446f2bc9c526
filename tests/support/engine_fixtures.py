"""What ranks found, once for all tests of engines, and a job that runs."""

import os

import pytest


def pytest_collection_modifyitems(items):
    """Let each test that may be the one that launches ranks, two and then one, take as long as they may."""
    launched = [item for item in items if "launch" in getattr(item, "fixturenames", ())]
    if launched:
        from support import case_runs  # needs torch

        for item in launched:
            item.add_marker(pytest.mark.timeout(3 * case_runs.LONG))


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Return small models: `untied` with a tokenizer, `tied` with weights in a .bin file, `dropout` that draws.

    `lacking` has all tensors but one, `reshaped` one of another shape.
    """
    pytest.importorskip("transformers", reason="the trainer needs transformers")
    from support import samples

    place = tmp_path_factory.mktemp("models")
    samples.make_model(place / "untied", tied=False, tokenizer=True)
    samples.make_model(place / "tied", tied=True, binary=True)
    samples.make_model(place / "dropout", tied=False, tokenizer=True, dropout=0.3)
    for name, change in (("lacking", samples.remove_a_tensor), ("reshaped", samples.reshape_a_tensor)):
        samples.change_weights(samples.make_model(place / name, tied=False, tokenizer=True), change)
    return place


@pytest.fixture(scope="session")
def launch(models):
    """Return a function that runs cases on ranks."""
    pytest.importorskip("torch", reason="the trainer needs torch")
    from support import case_runs

    def run(place, engine, world_size, *names):
        return case_runs.run_cases(place, engine, models, world_size, *names)

    return run


def _with_critic(*names):
    """Return cases of the critic where the release of verl can have one."""
    from support.verl_release import LACKS

    return () if LACKS.whole_value_loss else names


@pytest.fixture(scope="session")
def two_ranks(launch, tmp_path_factory):
    """Return what two ranks of an engine found, and the directory of their files."""
    every = ("contract", "cut_off", "planted", *(["remembered"] if os.access("/dev/shm", os.W_OK) else []))
    verl = (
        *every,
        "same_gradients",
        "many_updates",
        "reward_kl",
        "unlearnt_part",
        "published",
        "platform",
        "no_ray",
        "segments",
        "pieces",
        "probed",
        "undisturbed",
        "as_verl_saves",
        *_with_critic("ppo_steps", "ppo_resumed"),
    )
    legacy = (*every, "legacy_gradients", "published", "no_ray", "undisturbed")
    cases, found = {"verl": verl, "verl_legacy": legacy}, {}

    def of(engine):
        if engine not in found:
            place = tmp_path_factory.mktemp("two")
            found[engine] = launch(place, engine, 2, *cases.get(engine, every)), place
        return found[engine]

    return of


@pytest.fixture(scope="session")
def one_rank(launch, two_ranks):
    """Return what one rank of an engine found, in the directory of two ranks."""
    verl = (
        "other_ranks", "same_gradients", "expected_gradients", "plain_log_probs", "every_algorithm", "many_updates",
        "reward_kl", "learns", "not_finite", "halves", "refused", "no_ray", "by_hand", "reads", "fields", "effects",
        "unlearnt_part", "through_the_engine", "keys_matter", "segments", "expected_segments", "pieces", "probed",
        "undisturbed",
        *_with_critic(
            "ppo_steps", "ppo_by_hand", "gae_of_segments", "ppo_resumed", "ppo_of_two_ranks", "ppo_learns",
            "small_critic",
        ),
    )  # fmt: skip
    legacy = (
        "other_ranks", "legacy_gradients", "legacy_expected", "legacy_log_probs", "legacy_learns", "legacy_refused",
        "legacy_every_algorithm", "not_finite", "no_ray", "undisturbed",
    )  # fmt: skip
    cases, found = {"verl": verl, "verl_legacy": legacy}, {}

    def of(engine):
        if engine not in found:
            names = cases.get(engine, ("other_ranks",))
            found[engine] = launch(two_ranks(engine)[1], engine, 1, *names)
        return found[engine]

    return of


@pytest.fixture(scope="module")
def two(request, two_ranks):
    """Return what two ranks of the module's engine found; `RUNS` names it if it is not `verl`."""
    return two_ranks(getattr(request.module, "RUNS", "verl"))[0]


@pytest.fixture(scope="module")
def one(request, one_rank):
    """Return the same of one rank."""
    return one_rank(getattr(request.module, "RUNS", "verl"))


@pytest.fixture
def running_world(tmp_path):
    """The job `job` with its daemon, which runs by itself."""
    from support.synchronizers import Threads, World  # a plain install may lack what it needs

    (tmp_path / "job").mkdir()
    made = World(tmp_path / "job", Threads())
    made.run()
    yield made
    made.shut()
