"""The first version of an engine behind HTTP is compared with what the engine was started from."""

import pytest
from engine_beds import SglangBed, VllmBed, write_version
from hook_contract import load
from targets import target_of

from explorer_hooks.errors import RefusedError
from syncd.errors import ConfigError

START = {
    "model.a.weight": (4, 2),
    "model.b.bias": (3,),
    "model.c.weight": (2, 2),
    "lm_head.weight": (4, 4),
    "model.a.weight_scale": (1,),
}


@pytest.fixture(params=[VllmBed, SglangBed])
def bed_type(request):
    return request.param


def opened(bed_type, tmp_path, **settings):
    bed = bed_type(tmp_path, **settings)
    bed.engine.started_from = write_version(f"{tmp_path}/start", 1, shards=2, shapes=START)
    return bed


def version(tmp_path, **changed):
    shapes = {name: shape for name, shape in {**START, **changed}.items() if shape is not None}
    return target_of(write_version(f"{tmp_path}/version", 9, shapes=shapes), (1, 10))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model.c.weight": (2, 3)}, r"model\.c\.weight has shape \[2, 3\] instead of \[2, 2\]"),
        ({"lm_head.weight": (5, 4)}, r"lm_head\.weight has shape"),
        ({"model.b.bias": None}, r"model\.b\.bias is missing"),
        ({"model.d.weight": (1,)}, r"model\.d\.weight is unknown"),
    ],
)
def test_a_first_version_that_does_not_fit_is_refused_before_the_engine_is_paused(
    bed_type, tmp_path, changed, message
):
    with opened(bed_type, tmp_path) as bed:
        with pytest.raises(RefusedError, match=message):
            bed.open().prepare(version(tmp_path, **changed))
        assert not [path for path in bed.engine.paths() if path.startswith("POST")]


@pytest.mark.parametrize(
    "changed", [{}, {"lm_head.weight": None}, {"model.a.weight_scale": None}, {"model.inv_freq": (2,)}]
)
def test_what_checkpoints_of_one_model_differ_in_is_not_refused(bed_type, tmp_path, changed):
    with opened(bed_type, tmp_path) as bed:
        target = version(tmp_path, **changed)
        load(bed.open(), target)
        assert bed.runs(target)


def test_only_shapes_can_be_compared(bed_type, tmp_path):
    with opened(bed_type, tmp_path, start_check="shapes") as bed:
        bed.open().prepare(version(tmp_path, **{"model.b.bias": None}))
        with pytest.raises(RefusedError):
            bed.open().prepare(version(tmp_path, **{"model.c.weight": (9,)}))


def test_the_check_can_be_switched_off(bed_type, tmp_path):
    with opened(bed_type, tmp_path, start_check="off") as bed:
        bed.open().prepare(version(tmp_path, **{"model.c.weight": (9,)}))


def test_an_engine_that_was_started_from_what_this_host_cannot_read_is_not_checked(bed_type, tmp_path):
    with opened(bed_type, tmp_path) as bed:
        for start in ("org/model", "/not/here", str(tmp_path)):
            bed.engine.started_from = start
            bed.open().prepare(version(tmp_path, **{"model.c.weight": (9,)}))


def test_the_engines_directory_is_looked_for_where_this_host_has_it(bed_type, tmp_path):
    with opened(bed_type, tmp_path, path_map=f"{tmp_path}:/mnt/there") as bed:
        bed.engine.started_from = "/mnt/there/start"
        with pytest.raises(RefusedError, match="has shape"):
            bed.open().prepare(version(tmp_path, **{"model.c.weight": (9,)}))


def test_another_word_is_refused(bed_type, tmp_path):
    with pytest.raises(ConfigError):
        bed_type(tmp_path, start_check="maybe").open()
