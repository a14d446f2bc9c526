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
    instruments = [one for one in metrics._all.values() if one._name == family.name]
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
def test_queries_use_only_metrics_and_labels_that_the_daemon_exports(where):
    text, there = QUERIES[where], exported()
    named = set(re.findall(r"\bsyncd_\w+", text))
    assert named
    assert named <= there.keys()
    known = _OF_PROMETHEUS | set.union(*(there[name] for name in named))
    for listed, matched in _LABELS.findall(text):
        labels = re.findall(r"\w+", listed) or re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matched)
        assert set(labels) <= known, labels


def test_the_exported_metrics_have_their_exact_names_and_labels():
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


def test_legends_use_only_labels_that_their_query_keeps():
    for panel in panels():
        for target in panel["targets"]:
            groups = re.findall(r"by \(([^)]*)\)", target["expr"])
            left = set(re.findall(r"\w+", groups[0])) if groups else {"directory", "instance", "explorer"}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= left, panel["title"]


def test_dashboard_panels_are_distinct_and_do_not_overlap():
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
def test_every_alert_has_advice_and_a_test(rule):
    assert re.fullmatch(r"Syncd[A-Z]\w+", rule["alert"])
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
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


def test_promtool_accepts_and_tests_the_alert_rules(promtool):
    checked = promtool("check", "rules", RULES)
    assert checked.returncode == 0, checked.stderr
    assert f"{len(rules())} rules found" in checked.stdout
    tested = promtool("test", "rules", TESTS)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_promtool_accepts_the_dashboard_queries(promtool, tmp_path):
    expressions = [text for where, text in QUERIES.items() if where.startswith(("panel", "annotation"))]
    for name, value in _STAND_INS.items():
        expressions = [text.replace(name, value) for text in expressions]
    records = [{"record": f"a:{number}", "expr": text} for number, text in enumerate(expressions)]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": records}]}))
    checked = promtool("check", "rules", file)
    assert checked.returncode == 0, checked.stdout + checked.stderr
