"""Values that alerts, recorded series, dashboards and runbooks match labels with are values that somebody tells."""

import json
import re

import pytest
import yaml
from deploy.dashboards.reading import FOLDER
from docs.metric_pages import list_agent_label_values
from prometheus_client.parser import text_string_to_metric_families
from tests.deploy_rig import CHART, ROOT
from tests.unit.metrics_lint_test import controllers_page

from eelgrid_agent.enforce.rules import RefusalRule
from eelgrid_controller.energy.savings import BEST_FIT, BOTH, EELGRID
from eelgrid_controller.engines.kubernetes.pods.admission_pins import AdmissionCounts
from eelgrid_controller.engines.kubernetes.pods.gate_events import WriteFailure
from eelgrid_controller.kubernetes_composition import WAIT_REASONS
from eelgrid_controller.objectives.status import AttainmentVerdict
from eelgrid_controller.server.metrics.catalogue import METRICS, PENDING_REASONS, PLAN_CHANGES
from eelgrid_protos.agent_metrics import CATALOGUE

_METRIC = re.compile(r"(?<![\w:])(eelgrid_\w+)\{([^}]*)\}")
_MATCHER = re.compile(r"""(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)\"""")
_VERDICTS = tuple(one.value for one in AttainmentVerdict)
# Closed sets of label values of the controller's metrics, by metric and label.
OF_CONTROLLER = {
    ("eelgrid_nodes", "state"): ("ready", "lost"),
    ("eelgrid_workloads", "phase"): ("pending", "placed", "cancelled"),
    ("eelgrid_pending_workloads", "reason"): PENDING_REASONS,
    ("eelgrid_plan_changes_total", "change"): PLAN_CHANGES,
    ("eelgrid_saved_power_watts", "part"): ("placement", "limits"),
    ("eelgrid_compared_power_watts", "plan"): (BEST_FIT, EELGRID),
    ("eelgrid_compared_energy_joules_total", "plan"): (BEST_FIT, EELGRID),
    ("eelgrid_compared_replicas", "plan"): (BOTH, EELGRID, BEST_FIT),
    ("eelgrid_compared_gpus", "plan"): (BOTH, EELGRID, BEST_FIT),
    ("eelgrid_ledger_windows_total", "result"): ("taken", "again", "dropped", "refused", "unplaced"),
    ("eelgrid_ledger_forgotten_rows_total", "reason"): ("age", "size"),
    ("eelgrid_ended_connections_total", "reason"): ("flood", "expired", "authority", "unread", "idle"),
    ("eelgrid_traces_total", "result"): ("finished", "cancelled", "given_up"),
    ("eelgrid_spans_total", "result"): ("exported", "failed", "dropped"),
    ("eelgrid_promise_windows_total", "verdict"): _VERDICTS,
    ("eelgrid_service_windows_total", "verdict"): _VERDICTS,
    ("eelgrid_service_replicas", "state"): ("wanted", "serving"),
    ("eelgrid_kubernetes_pods_waiting", "reason"): WAIT_REASONS,
    ("eelgrid_kubernetes_admission_pins_total", "result"): tuple(AdmissionCounts().as_mapping()),
    ("eelgrid_kubernetes_writes_total", "result"): ("pinned", "opened", *(one.name.lower() for one in WriteFailure)),
}
# Of agents and of the controller.
CLOSED = OF_CONTROLLER | {
    (metric.name, label): values for metric in CATALOGUE for label, values in list_agent_label_values(metric).items()
}
# Values that only the cluster or the driver knows; a scrape brings the last three.
OPEN = {"budget", "gpu", "gpu_instance", "kind", "model", "namespace", "node", "pool", "workload", "xid"} | {
    "__name__",
    "instance",
    "job",
}

# A layout that waits has an alert of its own (EelgridMigPlanStuck).
LAYOUT_ONLY_RULES = frozenset(
    (
        RefusalRule.FOREIGN,
        RefusalRule.GEOMETRY,
        RefusalRule.MODE,
        RefusalRule.PENDING,
        RefusalRule.LOST,
        RefusalRule.IN_USE,
        RefusalRule.CAPACITY,
        RefusalRule.SERIAL,
        RefusalRule.ENGINE,
    )
)
# As it is meant, or over with the next cycles.
TRANSIENT_RULES = frozenset((RefusalRule.OBSERVE_ONLY, RefusalRule.SLEW))


def matched(query):
    """(metric, label, value) of every value that a query names; a variable of a dashboard is no value."""
    for metric, selector in _METRIC.findall(query):
        for label, sign, text in _MATCHER.findall(selector):
            values = text.split("|") if "~" in sign else [text]
            yield from ((metric, label, value) for value in values if "$" not in value)


def strange(query):
    """Those that nobody tells, and labels of which it is not known who tells what."""
    for metric, label, value in matched(query):
        if label not in OPEN and value not in CLOSED.get((metric, label), ()):
            yield f"{metric}{{{label}={value!r}}}"


def rules():
    groups = yaml.safe_load((CHART / "files" / "rules.yaml").read_text())["groups"]
    return {rule.get("alert") or rule["record"]: rule["expr"] for group in groups for rule in group["rules"]}


def dashboards():
    found = {}
    for path in sorted(FOLDER.glob("*.json")):
        stack = [json.loads(path.read_text())]
        while stack:
            one = stack.pop()
            stack += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
            if isinstance(one, str) and "eelgrid_" in one:
                found[f"{path.stem}: {one[:60]} {len(found)}"] = one
    return found


def pages():
    folder = ROOT / "docs"
    paths = sorted(folder.rglob("*.md"))
    return {str(path.relative_to(folder)): path.read_text() for path in paths if "eelgrid_" in path.read_text()}


@pytest.mark.parametrize("where", [rules, dashboards, pages])
def test_every_value_that_is_asked_for_is_reported_by_somebody(where):
    queries = where()
    assert any(True for query in queries.values() for _ in matched(query))
    assert {name: list(strange(query)) for name, query in queries.items() if list(strange(query))} == {}


def test_a_value_that_nobody_reports_is_noticed():
    assert list(strange('increase(eelgrid_guard_refusals_total{rule!~"slew|in_use"}[5m])')) == [
        "eelgrid_guard_refusals_total{rule='in_use'}"
    ]
    assert list(strange('eelgrid_nodes{state="gone", job="x"} and eelgrid_jobs{phase="any"}')) == [
        "eelgrid_nodes{state='gone'}",
        "eelgrid_jobs{phase='any'}",
    ]


def test_rules_that_say_nothing_of_a_refused_plan_are_those_that_the_alert_leaves_out():
    left_out = {RefusalRule(value) for _, label, value in matched(rules()["EelgridPlanRefused"]) if label == "rule"}
    assert left_out == TRANSIENT_RULES | LAYOUT_ONLY_RULES


def test_closed_sets_are_of_labels_that_the_metrics_have():
    labels = {name: one.labels for name, one in METRICS.items()} | {one.name: one.labels for one in CATALOGUE}
    for (metric, label), values in CLOSED.items():
        assert label in labels[metric], metric
        assert len(set(values)) == len(values) >= 2


def test_names_of_rules_are_spelt_in_one_way():
    assert [rule for rule in RefusalRule if not re.fullmatch(r"[a-z]+(-[a-z]+)*", rule)] == []


async def test_a_page_that_is_served_reports_no_other_values(tmp_path):
    text = await controllers_page(tmp_path)
    told = {
        (sample.name, label, value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        for label, value in sample.labels.items()
        if (sample.name, label) in CLOSED
    }
    assert {one for one in told if one[2] not in CLOSED[one[:2]]} == set()
    assert len({one[:2] for one in told}) >= 8
