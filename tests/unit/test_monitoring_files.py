"""The alert rules and the Grafana dashboard name only what the daemon exports, and the rules do what they say."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from syncd.observe.metrics import Metrics

pytest.importorskip("prometheus_client")
yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "examples" / "monitoring"
DASHBOARD = PLACE / "syncd.grafana.json"
RULES, TESTS = PLACE / "syncd.rules.yml", PLACE / "syncd.rules.test.yml"
_OF_PROMETHEUS = {"instance", "job", "le"}
_SUFFIXES = {
    "counter": ("_total",),
    "histogram": ("_bucket", "_count", "_sum"),
    "gauge": ("",),
    "info": ("_info",),
}
_LABELS = re.compile(r"(?:by|on|ignoring|without)\s*\(([^)]*)\)|\{([^}]*)\}")
_STAND_INS = {"$__rate_interval": "5m", "$directory": ".*"}


def exported():
    """Return what the daemon exports: each series with its labels."""
    found = {}
    metrics = Metrics("/j")
    for family in metrics.registry.collect():
        for suffix in _SUFFIXES[family.type]:
            found[f"{family.name}{suffix}"] = labels_of(metrics, family)
    return found


def labels_of(metrics, family):
    instruments = [one for one in vars(metrics._all).values() if getattr(one, "_name", None) == family.name]
    named = {name for one in instruments for name in one._labelnames}
    return {"directory", *named} | {name for sample in family.samples for name in sample.labels}


def panels():
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def rules():
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def queries():
    """Return every expression there is, with where it is."""
    for rule in rules():
        yield f"rule {rule['alert']}", rule["expr"]
    for panel in panels():
        for target in panel["targets"]:
            yield f"panel {panel['title']} {target['refId']}", target["expr"]
    document = json.loads(DASHBOARD.read_text())
    for variable in document["templating"]["list"]:
        if variable["type"] == "query":
            yield f"variable {variable['name']}", variable["definition"]
    for annotation in document["annotations"]["list"]:
        yield f"annotation {annotation['name']}", annotation["expr"]


QUERIES = dict(queries())


@pytest.mark.parametrize("where", QUERIES)
def test_every_metric_and_label_is_one_that_the_daemon_exports(where):
    text, there = QUERIES[where], exported()
    named = set(re.findall(r"\bsyncd_\w+", text))
    assert named
    assert named <= there.keys()
    known = _OF_PROMETHEUS | set.union(*(there[name] for name in named))
    for listed, matched in _LABELS.findall(text):
        labels = re.findall(r"\w+", listed) or re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matched)
        assert set(labels) <= known, labels


def test_what_the_test_of_metrics_would_catch():
    assert "syncd_is_leader" in exported()
    assert exported()["syncd_explorer_lag_steps"] == {"directory", "explorer"}
    assert "syncd_scan_duration_seconds_bucket" in exported()
    assert "syncd_versions_published" not in exported(), "a counter ends with _total"


def test_the_dashboard_shows_every_metric():
    shown = {
        name
        for where, text in QUERIES.items()
        if "rule" not in where
        for name in re.findall(r"\bsyncd_\w+", text)
    }
    bare = {re.sub(r"_(bucket|count|sum)$", "", name) for name in shown}
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in exported()}
    assert families - bare == {"syncd_info", "syncd_shards_present", "syncd_shards_expected"} | {
        "syncd_published_bytes_total",
        "syncd_steps_pruned_total",
    }


def test_legends_and_annotations_use_labels_that_the_query_leaves():
    for panel in panels():
        for target in panel["targets"]:
            groups = re.findall(r"by \(([^)]*)\)", target["expr"])
            left = set(re.findall(r"\w+", groups[0])) if groups else {"directory", "instance", "explorer"}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= left, panel["title"]


def test_panels_have_titles_and_places_of_their_own():
    document = json.loads(DASHBOARD.read_text())
    assert len({panel["id"] for panel in document["panels"]}) == len(document["panels"])
    places = set()
    for panel in document["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & places, panel["title"]
        assert at["x"] + at["w"] <= 24
        places |= cells
        assert panel["title"]
    assert all(panel["description"] for panel in panels())
    text = DASHBOARD.read_text()
    assert "http" not in text, "no address of anybody's machine"


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_every_alert_says_what_to_do_and_is_tested(rule):
    assert re.fullmatch(r"Syncd[A-Z]\w+", rule["alert"])
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert set(rule["annotations"]) == {"summary", "description"}
    assert "{{ $labels.directory }}" in rule["annotations"]["summary"]
    wanted = [
        test["exp_alerts"]
        for case in yaml.safe_load(TESTS.read_text())["tests"]
        for test in case["alert_rule_test"]
        if test["alertname"] == rule["alert"]
    ]
    assert [] in wanted, "that it stays silent"
    assert any(wanted), "that it is raised"


@pytest.fixture
def promtool():
    path = shutil.which("promtool")
    if path is None:
        pytest.skip("no promtool: apt install prometheus")
    return lambda *args: subprocess.run(
        [path, *map(str, args)], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_rules_are_rules_and_do_what_they_say(promtool):
    checked = promtool("check", "rules", RULES)
    assert checked.returncode == 0, checked.stderr
    assert f"{len(rules())} rules found" in checked.stdout
    tested = promtool("test", "rules", TESTS)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_the_queries_of_the_dashboard_are_queries(promtool, tmp_path):
    expressions = [text for where, text in QUERIES.items() if where.startswith(("panel", "annotation"))]
    for name, value in _STAND_INS.items():
        expressions = [text.replace(name, value) for text in expressions]
    records = [{"record": f"a:{number}", "expr": text} for number, text in enumerate(expressions)]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": records}]}))
    checked = promtool("check", "rules", file)
    assert checked.returncode == 0, checked.stdout + checked.stderr
