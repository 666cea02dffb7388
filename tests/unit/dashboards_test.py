"""The dashboards are what the generator writes, keep the rules of Grafana's linter, and ask for what exists.

The rules are those of grafana/dashboard-linter, said again: it is a Go program that no
package index has.
"""

import json
import re
import shutil
import subprocess

import pytest
from deploy.dashboards.reading import FOLDER, filled, names, panels
from tests.deploy_rig import ROOT

FILES = ("budget", "engine", "fleet", "node", "workloads")
DOCUMENTS = {name: json.loads((FOLDER / f"{name}.json").read_text()) for name in FILES}
SHOWN = [shown for name, document in DOCUMENTS.items() for shown in panels(document, name)]
IDS = [f"{shown.dashboard}: {shown.title}" for shown in SHOWN]
COLUMNS = 24
UNITS = {
    "watt",
    "joule",
    "kwatth",
    "short",
    "percentunit",
    "celsius",
    "rothz",
    "bytes",
    "Bps",
    "s",
    "ops",
    "dateTimeFromNow",
}
# What a workload's own page counts has the job of that page.
FOREIGN = re.compile(r'\{__name__="[\w:]+", workload=~"[^"]*"\}')


def known():
    """Kinds of all metrics in the agents' page and in the controller's."""
    found = {}
    for name in ("agent-metrics.md", "controller-metrics.md"):
        text = (ROOT / "docs" / "reference" / name).read_text()
        for metric, kind in re.findall(r"^\| `(\w+)` \| (\w+)", text, re.MULTILINE):
            parts = ("_bucket", "_count", "_sum") if kind == "histogram" else ("",)
            found |= {metric + part: "counter" if kind == "histogram" else kind for part in parts}
    return found


KNOWN = known()


def variables(document, kind):
    return [one for one in document["templating"]["list"] if one["type"] == kind]


def test_the_files_are_what_the_generator_writes():
    render = pytest.importorskip("deploy.dashboards.render", reason="no grafana-foundation-sdk")
    assert {path.name: path.read_text() for path in FOLDER.glob("*.json")} == dict(render.files())
    assert render.main(["--check"]) == 0


@pytest.mark.parametrize("name", FILES)
def test_a_dashboard_imports_without_a_click(name):
    document = DOCUMENTS[name]
    assert document["schemaVersion"] >= 36  # what Grafana 10 writes; older ones migrate on load
    assert document["editable"] is False
    assert not {"__inputs", "__requires", "id"} & set(document)
    assert document["uid"] == f"eelgrid-{name}"
    assert document["title"]
    assert document["description"]
    assert set(re.findall(r'"uid": "([^"]+)"', json.dumps(document))) == {"${datasource}", document["uid"]}
    (source,) = variables(document, "datasource")
    assert (source["name"], source["label"], source["query"]) == ("datasource", "Data source", "prometheus")


@pytest.mark.parametrize("name", FILES)
def test_variables_say_where_they_ask_and_ask_again(name):
    queries = variables(DOCUMENTS[name], "query")
    assert [one["name"] for one in queries][:2] == ["job", "instance"]
    for one in queries:
        assert one["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert one["refresh"] == 2
        assert one["multi"]
        assert one["includeAll"]
        assert one["label"] == {"gpu": "GPU"}.get(one["name"], one["name"].capitalize())
        assert one["allValue"] == (".+" if one["name"] in {"job", "instance"} else ".*")
        assert one["current"]["value"] == ["$__all"]
        selector = re.fullmatch(r"label_values\((.+), \w+\)|query_result\((.+)\)", one["query"])[0]
        for metric in names(selector) | set(re.findall(r"eelgrid_\w+", selector)):
            assert metric in KNOWN, metric


def test_a_gpu_is_chosen_by_node_and_index():
    (gpu,) = [one for one in variables(DOCUMENTS["node"], "query") if one["name"] == "gpu"]
    told = '{device="n-1 gpu 3", gpu="GPU-5f", index="3", instance="i", job="j", model="H100", node="n-1"} 1 1700000000'
    found = re.search(gpu["regex"].strip("/").replace("?<", "?P<"), told)
    assert found.groupdict() == {"text": "n-1 gpu 3", "value": "GPU-5f"}
    assert "label_join(" in gpu["query"]


@pytest.mark.parametrize("name", FILES)
def test_links_stand_where_every_version_shows_them(name):
    (link,) = DOCUMENTS[name]["links"]
    assert (link["type"], link["tags"], link["keepTime"]) == ("dashboards", ["eelgrid"], True)
    assert "placement" not in link


@pytest.mark.parametrize("shown", SHOWN, ids=IDS)
def test_values_are_coloured_by_thresholds_and_axes_hold_zero(shown):
    defaults = shown.panel["fieldConfig"]["defaults"]
    if shown.panel["type"] in {"stat", "bargauge", "state-timeline"}:
        # A timeline without it takes a gradient, in which nothing at all is green and everything red.
        assert defaults["color"] == {"mode": "thresholds"}
    if shown.panel["type"] == "timeseries":
        assert defaults["custom"]["axisSoftMin"] == 0.0
    for rule in shown.panel["fieldConfig"]["overrides"]:
        if rule["matcher"]["id"] == "byRegexp":
            bound = re.compile(rule["matcher"]["options"].strip("/"))
            assert any(bound.search(legend) for _, legend in shown.queries)


def test_money_says_its_currency():
    figures = [
        one
        for one in SHOWN
        if one.panel["type"] == "stat" and "price" in one.queries[0][0] and "ratio" not in one.queries[0][0]
    ]
    assert [one.title for one in figures] == ["Cost per hour"]
    for one in figures:
        assert one.queries[0][1] == "{{currency}}"
        assert one.panel["options"]["textMode"] == "value_and_name"


# The one metric of each physical figure, with how it becomes a total where it has parts.
SOURCES = {
    "power of all GPUs, measured": "eelgrid_measured_power_watts",
    "power of a pool, measured": "eelgrid_pool_power_watts",
    "power of a GPU, measured": "eelgrid_gpu_power_watts",
    "power of all GPUs, modelled": "eelgrid_modelled_power_watts",
    "power of an owner": "eelgrid_workload_gpu_energy_joules_total",
    "gap between counter and samples of a GPU": "eelgrid_gpu_energy_joules_total",
    "power saved": "eelgrid_saved_power_watts",
    "power of the compared plans": "eelgrid_compared_power_watts",
    "energy today": "eelgrid_energy_today_joules",
    "energy saved today": "eelgrid_saved_energy_today_joules",
    "cost today": "eelgrid_energy_today_cost",
    "price": "eelgrid_energy_price_per_joule",
    "price against the coming day": "eelgrid_energy_price_ratio",
    "budget, limit": "eelgrid_power_budget_limit_watts",
    "budget, measured": "eelgrid_power_budget_drawn_watts",
    "budget, claimed": "eelgrid_power_budget_claimed_watts",
    "budget, claimed by others": "eelgrid_power_budget_others_watts",
    "budget, over": "eelgrid_power_budget_over_watts",
    "budget, room": "eelgrid_power_budget_room_watts",
    "budget, shortfall": "eelgrid_power_budget_shortfall_watts",
    "limit of a job": "eelgrid_job_power_limit_watts",
    "limit of a job, wanted": "eelgrid_job_power_limit_wanted_watts",
    "limit of a GPU": "eelgrid_gpu_power_limit_watts",
    "limit of a node": "eelgrid_guard_power_budget_watts",
    "energy saved by the limit of a job": "eelgrid_job_energy_saved_ratio",
    "GPUs": "eelgrid_gpus",
    "GPUs allocated": "eelgrid_gpus_allocated_ratio",
    "GPUs compared": "eelgrid_compared_gpus",
    "GPUs of agents": "eelgrid_gpu_up",
    "nodes": "eelgrid_nodes",
    "workloads": "eelgrid_workloads",
    "workloads that wait, by reason": "eelgrid_pending_workloads",
    "promises, all": "eelgrid_promise_windows_total",
    "promises of a service": "eelgrid_service_windows_total",
}
PHYSICAL = re.compile(
    r"eelgrid_(?:\w*(?:watts|joules)(?:_total)?|energy_\w+|\w*saved\w*|gpus\w*|gpu_up|compared_gpus|nodes|workloads|pending_workloads|(?:promise|service)_windows_total)"
)
ENERGY_TODAY = 'max by (namespace, part) (eelgrid_energy_today_joules{job=~"$job", instance=~"$instance"'


def test_every_physical_figure_has_one_source_in_all_dashboards():
    shown = {name for one in SHOWN for expression, _ in one.queries for name in names(expression)}
    assert len(set(SOURCES.values())) == len(SOURCES)
    assert {name for name in shown if PHYSICAL.fullmatch(name)} == set(SOURCES.values())


def test_a_title_means_the_same_metrics_wherever_it_stands():
    told = {}
    for one in SHOWN:
        asked = frozenset(name for expression, _ in one.queries for name in names(expression))
        told.setdefault(one.title, {})[one.dashboard] = asked
    for title, found in told.items():
        assert len(set(found.values())) == 1, (title, found)


def test_energy_is_the_ledgers_of_today_and_of_an_owner_what_agents_charge():
    for one in SHOWN:
        for expression, _ in one.queries:
            if one.panel["fieldConfig"]["defaults"]["unit"] == "kwatth" or "kwatth" in json.dumps(one.panel):
                assert expression.endswith("/ 3.6e6"), one.title
            if "energy_today_joules" in expression:
                assert expression.count("eelgrid_energy_today_joules") == expression.count(ENERGY_TODAY), one.title
    kwh = {one.title: one.queries[0][0] for one in SHOWN if "kwatth" in json.dumps(one.panel)}
    assert {title: names(expression) for title, expression in kwh.items()} == {
        "Energy today": {"eelgrid_energy_today_joules"},
        "Energy today by namespace": {"eelgrid_energy_today_joules"},
        "Energy today without an owner": {"eelgrid_energy_today_joules"},
        "Energy of 24 h by owner": {"eelgrid_workload_gpu_energy_joules_total"},
        "Saved today": {"eelgrid_saved_energy_today_joules"},
    }
    # By namespace the ledger tells it: agents' joules by namespace would be a second source.
    (by,) = [one for one in variables(DOCUMENTS["workloads"], "custom") if one["name"] == "by"]
    assert "namespace" not in [one["value"] for one in by["options"]]


@pytest.mark.parametrize("name", FILES)
def test_what_looks_back_a_day_is_asked_once(name):
    for shown in panels(DOCUMENTS[name], name):
        if shown.panel["type"] == "stat":
            for target, (expression, _) in zip(shown.panel["targets"], shown.queries, strict=True):
                assert target["instant"] == ("[24h]" in expression), shown.title


def test_columns_begin_with_the_machine_and_units_and_words_are_of_values_alone():
    told = {}
    for shown in SHOWN:
        if shown.panel["type"] == "table":
            (organize,) = [one["options"] for one in shown.panel["transformations"] if one["id"] == "organize"]
            assert organize["indexByName"] == {"node": 0, "index": 1}
            defaults = shown.panel["fieldConfig"]["defaults"]
            # A time's unit on every column tells of a node's name that it was 26 years ago.
            assert defaults["unit"] == "short"
            assert "mappings" not in defaults
            rules = {rule["matcher"]["options"]: rule["properties"] for rule in shown.panel["fieldConfig"]["overrides"]}
            assert set(rules) == {name for name in organize["renameByName"].values() if name}
            told[shown.title] = {prop["value"] for props in rules.values() for prop in props if prop["id"] == "unit"}
    assert all(units <= UNITS for units in told.values())
    assert told["XIDs"] == told["Held and idle since"] == {"dateTimeFromNow"}
    assert told["All budgets"] == {"watt"}


@pytest.mark.parametrize("name", FILES)
def test_ids_are_unique_and_nothing_overlaps(name):
    every = DOCUMENTS[name]["panels"]
    ids = [panel["id"] for panel in every]
    assert sorted(set(ids)) == sorted(ids)
    assert min(ids) > 0
    taken = set()
    for panel in every:
        place = panel["gridPos"]
        assert 0 <= place["x"] <= place["x"] + place["w"] <= COLUMNS
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("shown", SHOWN, ids=IDS)
def test_a_panel_says_what_it_shows(shown):
    panel = shown.panel
    assert panel["title"][0].isupper()
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert panel["targets"]
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    for target in panel["targets"]:
        assert target["datasource"] == panel["datasource"]
        assert target["legendFormat"] != "__auto" or len(panel["targets"]) == 1
        # A bare number is what its words say only where there is one series.
        assert "noValue" not in panel["fieldConfig"]["defaults"]


@pytest.mark.parametrize("shown", SHOWN, ids=IDS)
def test_a_query_keeps_the_rules(shown):
    for expression, _ in shown.queries:
        ours = FOREIGN.sub("", re.sub(r"\$\w+_counter", "x", expression))
        selectors = re.findall(r"(\w+)\{([^}]*)\}", ours)
        assert selectors
        for metric, matchers in selectors:
            assert matchers.startswith('job=~"$job", instance=~"$instance"'), metric
            if KNOWN[metric] == "counter":
                assert re.search(r"(rate|increase)\(" + metric + r"\{", expression), f"{metric} is a counter"
            else:
                assert not re.search(r"(?<!_)(rate|increase)\(" + metric, expression), f"{metric} is no counter"
        assert set(re.findall(r"rate\([^\[]*\[([^\]]+)\]", expression)) <= {"$__rate_interval"}


@pytest.mark.parametrize("shown", SHOWN, ids=IDS)
def test_metrics_and_variables_exist(shown):
    document = DOCUMENTS[shown.dashboard]
    there = {one["name"] for one in document["templating"]["list"]} | {"__rate_interval"}
    for expression, legend in shown.queries:
        assert names(FOREIGN.sub("", expression)) <= set(KNOWN)
        assert set(re.findall(r"\$\{?(\w+)", expression)) <= there
        assert "$" not in filled(expression, document)
        assert "$" not in legend


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool")
def test_promtool_parses_every_query(tmp_path):
    rules = [
        {"record": f"panel:{shown.dashboard}:{at}_{number}", "expr": filled(expression, DOCUMENTS[shown.dashboard])}
        for at, shown in enumerate(SHOWN)
        for number, (expression, _) in enumerate(shown.queries)
    ]
    path = tmp_path / "rules.yaml"
    path.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"SUCCESS: {len(rules)} rules found" in done.stdout + done.stderr
