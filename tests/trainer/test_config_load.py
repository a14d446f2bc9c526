"""From a file and the command line to a configuration, or to one error that says all that is wrong."""

import difflib
import math
import os

import pytest

pytest.importorskip("pydantic", reason="the trainer needs pydantic")

from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from syncd.client.sync_policy import SyncMethod, SyncStyle
from syncd.errors import ConfigError, UsageError
from syncd.jobfile.model import KEYS
from trainer.config.algorithms import clip_bounds
from trainer.config.load import load_config

LEAST = """
[job]
dir = "job"
[model]
path = "model"
"""


@pytest.fixture
def write(tmp_path):
    def write(more="", least=LEAST):
        path = tmp_path / "file.toml"
        path.write_text(f"{least}\n{more}")
        return str(path)

    return write


def refused(path, *overrides):
    """Return the message of the error, with its place and hint."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert caught.value.exit_code == 78
    return f"{caught.value} | {caught.value.hint}"


def test_a_file_is_completed_by_defaults(write, tmp_path):
    config = load_config(write("[sync]\ninterval = 3"))
    assert (config.sync.interval, config.sync.method, config.data.groups) == (3, SyncMethod.CHECKPOINT, 8)
    assert config.job.dir == f"{tmp_path}/job"
    assert config.job.source == f"{tmp_path}/file.toml"


def test_adapters_are_read_with_their_paths_and_names(write, tmp_path):
    table = '[model.lora]\nrank = 8\nadapter = "start"\n'
    lora = load_config(write(table)).model.lora
    assert (lora.rank, lora.alpha, lora.targets, lora.publish) == (8, 16, "all-linear", "adapter")
    assert lora.adapter == f"{tmp_path}/start"
    named = load_config(
        write('[model.lora]\nrank = 8\ntargets = ["q_proj"]\nexclude = ["lm_head"]')
    ).model.lora
    assert (named.targets, named.exclude) == (("q_proj",), ("lm_head",))


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["--sync.interval", "4"], "sync.interval", 4),
        (["--sync.interval=4"], "sync.interval", 4),
        (["--sync.interval", "4", "--sync.interval", "5"], "sync.interval", 5),
        (["--algorithm.optimizer.lr", "2e-6"], "algorithm.optimizer.lr", 2e-6),
        (["--algorithm.optimizer.lr", "1"], "algorithm.optimizer.lr", 1.0),
        (["--algorithm.optimizer.betas", "[0.8, 0.9]"], "algorithm.optimizer.betas", (0.8, 0.9)),
        (["--algorithm.entropy_coeff", "-0.5"], "algorithm.entropy_coeff", -0.5),
        (["--trainer.start_daemon", "false"], "trainer.start_daemon", False),
        (["--trainer.nproc", "auto"], "trainer.nproc", "auto"),
        (["--trainer.nproc", "2"], "trainer.nproc", 2),
        (["--data.max_age", "7"], "data.max_age", 7),
        (["--data.max_age", "none"], "data.max_age", None),
        (["--monitor.progress", "none"], "monitor.progress", "none"),
        (["--monitor.kinds", '["wandb"]'], "monitor.kinds", ("wandb",)),
        (["--job.name", "123"], "job.name", "123"),
        (["--job.name", '"quoted"'], "job.name", "quoted"),
        (["--job.name=--dashes"], "job.name", "--dashes"),
        (["--job.name", "two\nx = 3"], "job.name", "two\nx = 3"),
        (["--job.name", "1\nx = 3"], "job.name", "1\nx = 3"),
        (["--monitor.options.wandb.mode", "offline"], "monitor.options", {"wandb": {"mode": "offline"}}),
        (["--engine.options.fsdp_size", "2"], "engine.options", {"fsdp_size": 2}),
        (["--sync.style", "Dynamic_By_Trainer"], "sync.style", SyncStyle.TRAINER_DRIVEN),
        (["--sync.method", "OFFLINE"], "sync.method", "checkpoint"),
        (["--daemon.max_bytes", "500GiB"], "daemon", {"max_bytes": "500GiB"}),
    ],
)
def test_the_command_line_overrides_the_file(write, arguments, key, value):
    found = load_config(write("[sync]\ninterval = 3\n[data]\nmax_age = 2"), arguments)
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("arguments", [["x"], ["-x", "1"], ["--sync.interval"], ["--sync..interval", "1"]])
def test_a_malformed_option_is_a_usage_error(write, arguments):
    with pytest.raises(UsageError):
        load_config(write(), arguments)


@pytest.mark.parametrize("value", ["[" * 5000, "9" * 5000])
def test_a_value_that_no_program_can_read_is_refused_like_any_other(write, value):
    assert "job.seed = " in refused(write(), "--job.seed", value)


def test_an_option_without_a_value_does_not_consume_the_next_option(write):
    with pytest.raises(UsageError, match=r"--trainer\.start_daemon has no value"):
        load_config(write(), ["--trainer.start_daemon", "--sync.interval", "2"])


@pytest.mark.parametrize(
    ("unknown", "meant"),
    [
        ("sync_interval", "sync.interval"),
        ("sync.intervall", "sync.interval"),
        ("sync.save-timeout", "sync.save_timeout"),
        ("trainer.sync_interval", "sync.interval"),
        ("model.lr", "algorithm.optimizer.lr"),
        ("optimizer.lr", "algorithm.optimizer.lr"),
        ("data.total_steps", "trainer.total_steps"),
        ("trianer", "trainer"),
        ("algoritm.optimizer", "algorithm.optimizer"),
        ("replay.capacity", "data.replay.capacity"),
        ("monitor.kind", "monitor.kinds"),
        ("clip_ration", "algorithm.clip_ratio"),
        ("xyzzy", None),
    ],
)
def test_the_closest_key_is_found_in_any_section(unknown, meant):
    assert KEYS.nearest(unknown) == meant


@given(st.sampled_from([name for name in KEYS.all if len(name) > 10]), st.data())
def test_a_key_with_one_wrong_letter_is_found(key, data):
    at = data.draw(st.integers(key.rfind(".") + 1, len(key) - 1))
    unknown = f"{key[:at]}~{key[at + 1 :]}"
    found = KEYS.nearest(unknown)
    assert found is not None
    assert found == key or closeness(found, unknown) >= closeness(key, unknown)


def closeness(one, other):
    return difflib.SequenceMatcher(None, other, one).ratio()


def test_an_unknown_key_is_reported_with_its_file_and_the_closest_key(write):
    path = write("[sync]\nintervall = 2")
    said = refused(path)
    assert said == f"unknown key sync.intervall: {path} | did you mean sync.interval?"


ADAPTERS = "[model.lora]\nrank = 8\n"
MERGED = ADAPTERS + 'publish = "merged"\n'


@pytest.mark.parametrize(
    ("table", "mode", "why", "hint"),
    [
        ("", "stream", 'with sync.mode = "stream"', 'sync.mode = "background", or sync.delta = "auto"'),
        (ADAPTERS, "background", "steps that are adapters", 'model.lora.publish = "merged", or sync.delta'),
    ],
)
def test_deltas_are_refused_where_no_step_could_be_one(write, table, mode, why, hint):
    path = write(table)
    said = refused(path, "--sync.delta", "on", "--sync.mode", mode)
    assert said.startswith('sync.delta = "on" has no effect')
    assert why in said
    assert hint in said
    for delta in ("auto", "off"):
        assert load_config(path, ["--sync.delta", delta, "--sync.mode", mode]).sync.delta == delta


@pytest.mark.parametrize("table", ["", MERGED])
def test_deltas_of_whole_weights_are_accepted(write, table):
    assert load_config(write(table), ["--sync.delta", "on"]).sync.delta == "on"


def test_an_unknown_key_of_the_command_line_is_reported_as_such(write):
    said = refused(write(), "--sync_interval", "2")
    assert said == "unknown key sync_interval: the command line | did you mean sync.interval?"


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("[sync]\ninterval = 0", "sync.interval = 0 is not a whole number at least 1"),
        ("[sync]\ninterval = 2.0", "sync.interval = 2.0 is not a whole number at least 1"),
        ('[sync]\ninterval = "2"', 'sync.interval = "2" is not a whole number at least 1'),
        ("[sync]\ninterval = true", "sync.interval = true is not a whole number at least 1"),
        ("[sync]\ncheck_finite = 1", "sync.check_finite = 1 is not true or false"),
        ('[sync]\nmethod = "tcp"', 'sync.method = "tcp" is not one of nccl, checkpoint, memory, auto'),
        ("[algorithm.optimizer]\nlr = inf", "algorithm.optimizer.lr = Infinity is not a number above 0"),
        ("[algorithm.optimizer]\nlr = nan", "algorithm.optimizer.lr = NaN is not a number above 0"),
        ("[algorithm.optimizer]\nbetas = [0.9]", "algorithm.optimizer.betas = [0.9] is not a list of 2"),
        ("[algorithm.optimizer]\nbetas = [0.9, 1.0]", "betas = [0.9, 1.0] is not a list of 2, each a number"),
        ("[data]\nmax_age = -1", 'data.max_age = -1 is not a whole number at least 0 or "none"'),
        ("[trainer]\nnproc = 0", 'trainer.nproc = 0 is not a whole number at least 1 or "auto"'),
        ("[monitor]\nkinds = [1]", "monitor.kinds = [1] is not a list, each text"),
        ("[monitor]\nkinds = 'wandb'", 'monitor.kinds = "wandb" is not a list'),
        ("[engine]\noptions = 3", "engine.options = 3 is not a table"),
        ("[daemon]\nkeep_last = 0", "daemon.keep_last: keep_last = 0 is less than 1"),
        ("[daemon]\nkeep_lost = 1", "daemon.keep_lost: unknown key 'keep_lost' in [daemon]"),
        ("[trainer]\nname = 'a/b'", "trainer.name = 'a/b' cannot be a file name"),
    ],
)
def test_a_wrong_value_is_reported_with_the_accepted_values(write, table, said):
    path = write(table)
    assert said in refused(path)
    assert path in refused(path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--job.permissions", "group"], "job.permissions = 'group' needs a group"),
        (["--job.group", "users"], "job.permissions = 'umask' and group = 'users' contradict each other"),
        (["--algorithm.name", "sft"], 'algorithm.name = "sft" needs data.sft_path'),
        (["--data.sft_ratio", "0.5"], "data.sft_ratio = 0.5 needs data.sft_path"),
        (["--algorithm.mini_batches", "3"], "= 64 rows cannot be split evenly"),
        (["--data.max_waiting", "63"], "data.max_waiting = 63 is less than the 64 rows"),
        (["--data.beyond", "weight"], "needs data.max_age"),
        (["--algorithm.clip_ratio", "1.5"], "algorithm.clip_ratio = 1.5 clips nothing below"),
        (["--algorithm.clip_ratio_low", "1"], "algorithm.clip_ratio_low = 1 clips nothing below"),
        (["--algorithm.optimizer.schedule", "cosine"], "has no end"),
        (["--algorithm.name", "grop"], 'algorithm.name = "grop" is not one of'),
        (["--algorithm.advantage", "gae"], 'algorithm.advantage = "gae" needs a critic'),
        (["--critic.enabled", "true"], "critic.enabled has no effect with the estimator grpo"),
        (["--critic.clip_range", "0.2"], "critic.clip_range has no effect without a critic"),
        (["--critic.optimizer.lr", "1e-3"], "critic.optimizer has no effect without a critic"),
        (["--algorithm.lam", "0.9"], "algorithm.lam has no effect with the estimator grpo"),
        (["--algorithm.name", "ppo", "--algorithm.gamma", "0.9"], "with the estimator reinforce_plus_plus"),
        (
            ["--algorithm.name", "ppo", "--critic.enabled", "true", "--critic.mini_batches", "3"],
            "= 64 rows cannot be split evenly into critic.mini_batches = 3",
        ),
        (
            ["--algorithm.name", "ppo", "--critic.enabled", "true", "--critic.optimizer.schedule", "cosine"],
            'critic.optimizer.schedule = "cosine" has no end',
        ),
        (
            ["--algorithm.name", "ppo", "--critic.enabled", "true", "--algorithm.norm_advantage", "true"],
            "norm_advantage has no effect with the estimator gae",
        ),
        (
            ["--algorithm.name", "sft", "--data.sft_path", "x", "--critic.enabled", "true"],
            'critic.enabled has no effect with algorithm.name = "sft"',
        ),
        (["--engine.name", "mine", "--critic.enabled", "true"], 'the engine "mine" trains no critic'),
        (
            ["--algorithm.name", "dpo"],
            'algorithm.name = "dpo" is not supported: verl 0.9 has no loss over pairs',
        ),
        (["--algorithm.name", "ORPO"], "verl 0.9 has no loss over pairs of responses"),
        (["--algorithm.name", "kto"], "verl 0.9 has no loss over single responses"),
        (["--algorithm.name", "rm"], "verl 0.9 has no training of reward models"),
        (["--algorithm.name", "reward_model"], "verl 0.9 has no training of reward models"),
        (
            ["--algorithm.teacher_coef", "0.1", "--algorithm.temperature", "0.7"],
            "needs algorithm.temperature = 1",
        ),
        (
            ["--algorithm.name", "sft", "--data.sft_path", "x", "--algorithm.teacher_coef", "0.1"],
            'algorithm.teacher_coef has no effect with algorithm.name = "sft"',
        ),
        (["--algorithm.loss_options.cut", "2"], "algorithm.loss_options has no effect with the loss vanilla"),
        (["--data.strategy_options.depth", "2"], "strategy_options has no effect without data.strategy"),
        (["--algorithm.advantage", "remax"], "greedy rollout"),
        (["--algorithm.advantage", "nope"], 'algorithm.advantage = "nope" is not one of'),
        (["--algorithm.loss", "nope"], 'algorithm.loss = "nope" is not one of'),
        (["--algorithm.loss_agg_mode", "mean"], 'algorithm.loss_agg_mode = "mean" is not one of'),
        (["--algorithm.kl_type", "full"], 'algorithm.kl_type = "full" is not one of'),
        (
            ["--engine.strategy", "deepspeed"],
            'engine.strategy = "deepspeed" is not one of fsdp, fsdp2',
        ),
        (
            ["--algorithm.name", "grpo_passk", "--data.group_size", "1"],
            "leaves grpo_passk nothing to compare",
        ),
        (
            ["--algorithm.name", "gpg", "--algorithm.clip_ratio", "0.3"],
            "clip_ratio has no effect with the loss gpg",
        ),
        (
            ["--algorithm.name", "sapo", "--algorithm.loss_agg_mode", "token-mean"],
            "algorithm.loss_agg_mode has no effect with the loss sapo",
        ),
        (
            ["--algorithm.name", "rloo", "--algorithm.norm_advantage", "false"],
            "algorithm.norm_advantage has no effect with the estimator rloo",
        ),
        (["--selection.patience", "5"], "selection.patience needs selection.metric"),
        (["--selection.metric", "validation/loss"], "needs data.validation_path"),
        (["--selection.metric", "reward/mean"], 'metric = "critic/score/mean"'),
        (["--selection.metric", "rollout/k3_kl"], 'metric = "rollout_corr/k3_kl"'),
        (
            ["--trainer.validation_interval", "5"],
            "trainer.validation_interval has no effect without data.validation_path",
        ),
        (
            ["--algorithm.turn_rewards", "true"],
            "algorithm.turn_rewards has no effect with the estimator grpo",
        ),
        (
            ["--algorithm.name", "sft", "--data.sft_path", "x", "--algorithm.options.clip_ratio_c", "4"],
            'algorithm.options has no effect with algorithm.name = "sft"',
        ),
        (["--algorithm.options.clip_ratio_d", "4"], "did you mean clip_ratio_c?"),
        (["--algorithm.options.tau_pos", "2"], "the loss vanilla does not read algorithm.options.tau_pos"),
        (["--algorithm.options.clip_ratio", "2"], "algorithm.options.clip_ratio is not set here"),
        (
            ["--algorithm.options.clip_ratio_c", "1"],
            "algorithm.options.clip_ratio_c = 1 is not an accepted value",
        ),
        (["--algorithm.options.shuffle", "true"], "algorithm.options.shuffle is not supported"),
        (
            ["--algorithm.options.calculate_entropy", "true"],
            "does nothing: the entropy is measured without it",
        ),
        (["--algorithm.loss", "dro"], "dro needs a penalty"),
        (
            ["--algorithm.options.policy_loss.rollout_correction.bypass_mode", "true"],
            'old_logprobs = "rollout"',
        ),
        (
            [
                "--algorithm.old_logprobs",
                "rollout",
                "--algorithm.options.policy_loss.rollout_correction.rollout_is",
                "token",
            ],
            "is already taken against the log-probs of explorers",
        ),
        (["--engine.options.forward_prefetsh", "true"], "verl has no engine.options.forward_prefetsh"),
        (["--engine.options.forward_prefetch", "true"], 'does nothing with engine.strategy = "fsdp2"'),
        (["--engine.options.pad_to_length", "true"], "engine.options.pad_to_length is not supported"),
        (["--engine.options.use_dynamic_bsz", "true"], "use_dynamic_bsz needs a bound"),
        (
            ["--engine.options.max_token_len_per_gpu", "9"],
            "does nothing without engine.options.use_dynamic_bsz",
        ),
        (["--job.dir", ""], "job.dir is empty"),
    ],
)
def test_contradicting_keys_are_refused(write, arguments, said):
    assert said in refused(write(), *arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--algorithm.name", "sft", "--data.sft_path", "x.jsonl"],
        ["--algorithm.name", "cispo", "--algorithm.clip_ratio_low", "10"],
        ["--algorithm.optimizer.schedule", "cosine", "--trainer.total_steps", "5"],
        ["--algorithm.optimizer.schedule", "cosine", "--algorithm.optimizer.schedule_steps", "5"],
        ["--data.beyond", "weight", "--data.max_age", "0"],
        ["--algorithm.options.policy_loss.rollout_correction.rollout_is_threshold", "0.5_2.0"],
        ["--algorithm.options.policy_loss.rollout_correction.rollout_is_threshold", "0_2.0"],
        ["--algorithm.name", "ppo", "--algorithm.turn_rewards", "true"],
        ["--algorithm.loss", "dro", "--algorithm.options.policy_loss.dro_beta", "0.1"],
        ["--engine.strategy", "fsdp", "--engine.options.forward_prefetch", "true"],
        ["--engine.name", "other", "--engine.strategy", "own", "--algorithm.name", "own"],
        ["--algorithm.advantage", "gae", "--algorithm.loss", "gspo", "--critic.enabled", "true"],
        ["--algorithm.name", "sft", "--data.sft_path", "x.jsonl", "--critic.clip_range", "0.1"],
    ],
)
def test_compatible_keys_are_accepted(write, arguments):
    load_config(write(), arguments)


def test_ppo_has_gae_with_a_critic_and_whitened_returns_without(write):
    path = write()
    ppo = ["--algorithm.name", "ppo"]
    assert load_config(path, ppo).algorithm.advantage == ""
    critic = [*ppo, "--critic.enabled", "true"]
    assert load_config(path, critic).algorithm.advantage == "gae"
    assert (
        load_config(path, ["--critic.enabled", "true", "--algorithm.advantage", "gae"]).algorithm.name
        == "grpo"
    )
    assert "reads no values" in refused(path, *critic, "--algorithm.advantage", "rloo")


PUBLISHED = {
    "grpo": (0.2, 0.2, "token-mean", {}),
    "ppo": (0.2, 0.2, "token-mean", {}),
    "gspo": (3e-4, 4e-4, "seq-mean-token-mean", {}),
    "cispo": (10.0, 0.2, "token-mean", {}),
    "dppo_tv": (0.15, 0.15, "token-mean", {"clip_ratio_c": 20.0}),
    "dppo_kl": (0.05, 0.05, "token-mean", {"clip_ratio_c": 20.0}),
    "clip_cov": (1.0, 1.0, "token-mean", {}),
    "kl_cov": (None, None, "token-mean", {"policy_loss": {"ppo_kl_coef": 1.0}}),
    "gpg": (None, None, "token-mean", {}),
}
"""Clip below and above, aggregation and options of the publications."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_algorithm_name_sets_the_defaults_of_its_publication(write, name):
    found = load_config(write(), ["--algorithm.name", name]).algorithm
    below, above, mode, options = PUBLISHED[name]
    assert clip_bounds(found) == (None if below is None else (below, above))
    assert (found.loss_agg_mode, found.options) == (mode, options)


def test_explicit_settings_override_the_defaults_of_the_publication(write):
    gspo = ["--algorithm.name", "gspo"]
    own = load_config(
        write(), [*gspo, "--algorithm.clip_ratio", "0.2", "--algorithm.loss_agg_mode", "token-mean"]
    )
    assert clip_bounds(own.algorithm) == (0.2, 0.2)
    assert own.algorithm.loss_agg_mode == "token-mean"
    high = load_config(write(), [*gspo, "--algorithm.clip_ratio_high", "0.001"])
    assert clip_bounds(high.algorithm) == (3e-4, 1e-3)
    kl = ["--algorithm.name", "kl_cov", "--algorithm.options.policy_loss.kl_cov_ratio", "0.002"]
    options = load_config(write(), kl).algorithm.options
    assert options == {"policy_loss": {"ppo_kl_coef": 1.0, "kl_cov_ratio": 0.002}}


def test_a_warmup_as_long_as_the_cosine_schedule_is_refused(write):
    more = "[algorithm.optimizer]\nschedule = 'cosine'\nschedule_steps = 5\nwarmup_steps = 5"
    assert "leaves nothing of" in refused(write(more))


def test_all_problems_are_reported_in_one_error(write):
    more = "[sync]\ninterval = 0\nmetod = 1\n[data]\ngroups = 'x'\n[nope]\na = 1"
    said = refused(write(more, least="[model]\npath = 'm'"), "--sync.offset", "-1")
    assert said.startswith("6 problems with the configuration:\n")
    for part in (
        "job.dir is missing: ",
        "sync.interval = 0 is not",
        "unknown key sync.metod: ",
        "(did you mean sync.method?)",
        'data.groups = "x" is not',
        "unknown key nope",
        "sync.offset = -1 is not a whole number at least 0: the command line",
    ):
        assert part in said


def test_problems_between_keys_name_where_each_key_was_set(write):
    said = refused(write("[data]\nmax_waiting = 3"), "--algorithm.mini_batches", "3")
    assert "(data.groups x data.group_size): " in said
    assert "algorithm.mini_batches = 3: the command line" in said


def test_missing_sections_are_reported_by_their_required_keys(write):
    said = refused(write(least=""))
    assert "job.dir is missing" in said
    assert "model.path is missing" in said


def test_a_section_that_is_not_a_table_is_refused(write):
    assert (
        refused(write(), "--sync", "3") == "sync = 3 is not a table: the command line | trainer config docs"
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[job", "not TOML"),
        (b"\xff\xfe", "not TOML"),
        (None, "cannot be read"),
        (b"a = " + b"[" * 5000, "not TOML"),
        (b"a = " + b"9" * 5000, "not TOML"),
    ],
)
def test_a_file_that_is_not_toml_or_cannot_be_read_is_refused(tmp_path, content, said):
    path = tmp_path / "file.toml"
    if content is not None:
        path.write_bytes(content)
    assert said in refused(str(path))


def test_paths_are_relative_to_the_file_or_to_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "files").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("SOMEWHERE", "/somewhere")
    monkeypatch.setenv("HOME", "/home/me")
    path = tmp_path / "files" / "file.toml"
    path.write_text("[job]\ndir = '../jobs/a'\nstate_dir = '~/state'\n[model]\npath = '$SOMEWHERE/model'\n")
    config = load_config("../files/file.toml", ["--data.sft_path", "data.jsonl"])
    assert config.job.dir == f"{tmp_path}/jobs/a"
    assert config.job.state_dir == "/home/me/state"
    assert config.model.path == "/somewhere/model"
    assert config.data.sft_path == f"{tmp_path}/here/data.jsonl"
    assert config.job.source == str(path)


def test_an_unset_environment_variable_is_reported(write, monkeypatch):
    monkeypatch.delenv("NOT_SET", raising=False)
    said = refused(write(), "--model.path", "${NOT_SET}/model")
    assert "names ${NOT_SET}, which is not set: the command line" in said


def test_a_configuration_is_immutable(write):
    config = load_config(write())
    with pytest.raises(ValidationError):
        config.sync.interval = 2
    assert math.isclose(config.algorithm.clip_ratio, 0.2)
    assert os.path.isabs(config.model.path)


def test_the_length_of_a_chain_is_bounded(write):
    assert load_config(write("[sync]\nkeyframe_every = 1024")).sync.keyframe_every == 1024
    assert "keyframe_every" in refused(write("[sync]\nkeyframe_every = 1025"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--selection.metric", "critic/score/means"], "did you mean critic/score/mean?"),
        (["--selection.metric", "sync/step"], "no step of this run has such a figure"),
        (["--selection.metric", "critic/vf_loss"], "no step of this run has such a figure"),
        (["--selection.metric", "actor/kl_loss"], "no step of this run has such a figure"),
        (
            ["--trainer.total_steps", "3", "--algorithm.optimizer.warmup_steps", "4"],
            "is longer than the run, which has 3 updates: the command line | algorithm.optimizer.warmup_steps = 0",
        ),
        (
            [
                *("--trainer.total_steps", "3", "--algorithm.optimizer.warmup_steps", "3"),
                *("--algorithm.optimizer.schedule", "linear"),
            ],
            "leaves nothing of the 3 updates of the run",
        ),
        (
            [
                *("--algorithm.name", "ppo", "--critic.enabled", "true"),
                *("--trainer.total_steps", "3", "--critic.warmup_steps", "3"),
            ],
            "leaves nothing of trainer.total_steps = 3 to the policy",
        ),
        (
            ["--algorithm.optimizer.min_lr_ratio", "0.1"],
            "min_lr_ratio has no effect with algorithm.optimizer.schedule = ",
        ),
        (["--data.group_size", "1"], "leaves grpo nothing to compare a rollout with"),
        (["--algorithm.name", "gpro"], "did you mean grpo?"),
        (["--algorithm.kl_type", "nothing"], "trainer config docs"),
    ],
)
def test_what_cannot_come_true_is_refused_before_the_start_with_a_hint(write, arguments, said):
    assert said in refused(write(), *arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--selection.metric", "critic/score/mean"],
        ["--selection.metric", "tools/search/calls"],
        ["--selection.metric", "actor/kl_loss", "--algorithm.kl_coef", "0.1"],
        ["--selection.metric", "my/figure", "--engine.name", "mine"],
        ["--trainer.total_steps", "3", "--algorithm.optimizer.warmup_steps", "3"],
        ["--data.group_size", "1", "--algorithm.name", "reinforce_plus_plus"],
        ["--data.group_size", "1", "--algorithm.name", "ppo", "--critic.enabled", "true"],
        ["--data.group_size", "1", "--algorithm.name", "sft", "--data.sft_path", "x"],
    ],
)
def test_what_can_come_true_is_accepted(write, arguments):
    load_config(write(), arguments)
