"""Which rank is this: environments of torchrun, srun and neither, as tables; node lists by their inverse."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncd.errors import ConfigError
from trainer.launch.rank_env import STARTED_BY, RankEnv, first_host, read_rank_env, tasks_per_node

TORCHRUN = {
    "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "a", "MASTER_PORT": "29500",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "2", "SLURM_PROCID": "3", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "3,2",
    "SLURM_STEP_NODELIST": "n[0-1]", "SLURM_NTASKS": "5", "SLURM_JOB_NODELIST": "n[0-3]",
    "SLURM_TASKS_PER_NODE": "3,2",
}  # fmt: skip


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


class TestAlone:
    @pytest.mark.parametrize(
        "environ",
        [
            {},
            {"MASTER_ADDR": "a", "MASTER_PORT": "1"},
            {"RANK": "", "WORLD_SIZE": ""},
            without(SLURM, "SLURM_STEP_ID"),
            SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"},
            without(SLURM | {"SLURM_NTASKS": "1"}, "SLURM_STEP_NUM_TASKS"),
            SLURM | {"SLURM_STEP_ID": "4294967290"},
        ],
        ids=["bare", "meeting point", "empty", "batch script", "one task", "one task, old", "salloc shell"],
    )
    def test_without_a_launcher_there_is_one_rank(self, environ):
        assert read_rank_env(environ) == RankEnv()


class TestTorchrun:
    def test_all_variables_of_the_launcher_are_read(self):
        assert read_rank_env(TORCHRUN) == RankEnv(5, 1, 8, 4, "a", 29500, "torchrun")

    def test_torchrun_wins_over_slurm(self):
        assert read_rank_env(SLURM | TORCHRUN).origin == "torchrun"

    def test_ranks_started_by_the_trainer_have_their_own_origin(self):
        assert read_rank_env(TORCHRUN | {STARTED_BY: "trainer"}).origin == "trainer"

    @pytest.mark.parametrize("name", sorted(TORCHRUN))
    def test_a_missing_variable_is_named(self, name):
        with pytest.raises(ConfigError, match=rf"but not {name}$") as caught:
            read_rank_env(without(TORCHRUN, name))
        assert "unset RANK" in caught.value.hint

    @pytest.mark.parametrize(
        "wrong",
        [
            {"RANK": "8"},
            {"LOCAL_RANK": "4"},
            {"LOCAL_WORLD_SIZE": "9"},
            {"WORLD_SIZE": "-8"},
            {"RANK": "x"},
            {"RANK": "٣"},
            {"MASTER_PORT": "0"},
            {"MASTER_PORT": "65536"},
        ],
        ids=str,
    )
    def test_an_impossible_rank_environment_is_refused(self, wrong):
        with pytest.raises(ConfigError):
            read_rank_env(TORCHRUN | wrong)

    def test_rank_variables_round_trip(self):
        assert read_rank_env(TORCHRUN).variables() == TORCHRUN


class TestSlurm:
    def test_all_variables_of_the_launcher_are_read(self):
        place = read_rank_env(SLURM)
        assert (place.rank, place.local_rank, place.world_size, place.local_world_size) == (3, 0, 5, 2)
        assert (place.master_addr, place.origin) == ("n0", "slurm")

    def test_variable_names_of_older_slurm_versions_are_read(self):
        older = without(SLURM, "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST")
        assert read_rank_env(older) == read_rank_env(SLURM)

    def test_all_ranks_of_a_slurm_step_share_a_port_and_steps_differ(self):
        def port(job, step, rank):
            return read_rank_env(
                SLURM | {"SLURM_JOB_ID": f"{job}", "SLURM_STEP_ID": f"{step}", "SLURM_PROCID": f"{rank}"}
            ).master_port

        assert port(17, 2, 0) == port(17, 2, 4)
        ports = [port(job, step, 0) for job in range(1000, 1100) for step in range(5)]
        assert len(set(ports)) == len(ports)
        assert min(ports) > 10000
        assert max(ports) < 32768

    def test_an_explicit_master_address_and_port_are_used(self):
        place = read_rank_env(SLURM | {"MASTER_ADDR": "ib0", "MASTER_PORT": "4000"})
        assert (place.master_addr, place.master_port) == ("ib0", 4000)

    @pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID"])
    def test_a_missing_variable_is_named(self, name):
        with pytest.raises(ConfigError, match=rf"but not {name}$"):
            read_rank_env(without(SLURM, name))

    @pytest.mark.parametrize("wrong", [{"SLURM_NODEID": "2"}, {"SLURM_STEP_TASKS_PER_NODE": "many"}], ids=str)
    def test_an_impossible_rank_environment_is_refused(self, wrong):
        with pytest.raises(ConfigError):
            read_rank_env(SLURM | wrong)


@pytest.mark.parametrize(
    ("text", "counts"), [("4(x2),3", [4, 4, 3]), ("1", [1]), ("2,2(x3)", [2, 2, 2, 2])], ids=str
)
def test_slurm_tasks_per_node_are_parsed(text, counts):
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("n0", "n0"),
        ("node[01-03,7],x2", "node01"),
        ("n[08-10,2],x", "n08"),
        ("n[2,08-10],x", "n2"),
        ("r[1-2]n[3-4]-ib", "r1n3-ib"),
        ("a-1,b.example.org", "a-1"),
    ],
    ids=str,
)
def test_the_first_host_of_a_slurm_node_list_is_found(nodelist, host):
    assert first_host(nodelist) == host


@pytest.mark.parametrize(
    "nodelist", ["", ",", "n[1", "n1]", "n[]", "n[a-b]", "n[1-2-3]", "n[[1]]", "x,n[1", "x,n[a-b]"]
)
def test_a_malformed_node_list_is_refused(nodelist):
    with pytest.raises(ConfigError):
        first_host(nodelist)


RANGES = st.tuples(st.integers(0, 2000), st.integers(0, 20), st.integers(1, 5))
PLAIN = st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True)


@given(
    st.lists(
        PLAIN | st.tuples(PLAIN, st.lists(RANGES, min_size=1, max_size=4), PLAIN | st.just("")), min_size=1
    )
)
def test_the_first_host_of_generated_node_lists_is_found(items):
    text, names = [], []
    for item in items:
        if isinstance(item, str):
            text.append(item)
            names.append(item)
            continue
        before, ranges, after = item
        shown = [f"{a:0{w}d}-{a + n:0{w}d}" if n else f"{a:0{w}d}" for a, n, w in ranges]
        text.append(f"{before}[{','.join(shown)}]{after}")
        first, _, width = ranges[0]
        names.append(f"{before}{first:0{width}d}{after}")
    assert first_host(",".join(text)) == names[0]


@given(
    st.dictionaries(st.sampled_from(sorted({*TORCHRUN, *SLURM})), st.text("0123456789ab[](),-x", max_size=8))
)
def test_any_environment_gives_a_valid_rank_or_a_config_error(environ):
    try:
        place = read_rank_env(environ)
    except ConfigError:
        pass
    else:
        assert 0 <= place.rank < place.world_size
        assert 0 <= place.local_rank < place.local_world_size <= place.world_size
