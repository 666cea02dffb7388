"""The shipped rules made faster: what is a time, what is none, and that nothing strange slips through."""

import shutil
import subprocess

import pytest
import yaml
from tests.compressed_rules import NotUnderstood, compressed, compressed_expression
from tests.deploy_rig import CHART

SHIPPED = yaml.safe_load((CHART / "files" / "rules.yaml").read_text())


def by_name(document):
    return {rule.get("alert") or rule["record"]: rule for group in document["groups"] for rule in group["rules"]}


FASTER = by_name(compressed(SHIPPED, 60.0))


def test_every_span_of_the_shipped_rules_is_sixty_times_shorter():
    assert FASTER["EelgridPodsWaitBesideFreeGpus"]["for"] == "60000ms"
    assert {group.get("interval") for group in compressed(SHIPPED, 60.0)["groups"]} == {None, "1000ms"}
    slow = FASTER["cluster:eelgrid_gpu_energy:kwh24h"]["expr"]
    assert slow == "sum_over_time(cluster:eelgrid_gpu_power:watts5m[1439983ms]) * 60 / 3.6e6"
    drifted = FASTER["EelgridCapDrifted"]["expr"]
    assert (drifted.count("[15000ms]"), drifted.count("offset 15000ms"), drifted.count("15m")) == (1, 2, 0)


@pytest.mark.parametrize(
    ("alert", "part"),
    [
        ("EelgridServiceNotSeen", "eelgrid_service_window_age_seconds > 2"),
        ("EelgridAgentNotSampling", "eelgrid_agent_sample_age_seconds > 1"),
        ("EelgridJournalLagging", "eelgrid_journal_lag_seconds > 0.0833333333"),
        ("EelgridLedgerBehind", "_age_seconds > 10 and on (job, instance) eelgrid_agents_connected > 0"),
        ("EelgridClusterSilent", "eelgrid_kubernetes_silence_seconds > 5"),
        ("EelgridXidContained", 'eelgrid_gpu_xid_last_timestamp_seconds{xid="94"} < 30'),
        # No times.
        ("EelgridSloBurningFast", "> 14.4 * 0.01"),
        ("EelgridSloBurningFast", ">= 20"),
        ("EelgridGpuHeldButIdle", "> 3.6e6"),
        ("EelgridBudgetNear", "> 0.95"),
        ("EelgridNodesLost", 'eelgrid_nodes{state="lost"} > 0'),
    ],
)
def test_thresholds_in_seconds_are_shorter_and_no_others(alert, part):
    assert part in FASTER[alert]["expr"]


def test_nothing_is_left_out_and_what_is_no_time_stays():
    before = by_name(SHIPPED)
    assert FASTER.keys() == before.keys()
    for name, rule in FASTER.items():
        assert {key: rule[key] for key in rule if key not in {"expr", "for"}} == {
            key: before[name][key] for key in before[name] if key not in {"expr", "for"}
        }
        assert ("for" in rule) == ("for" in before[name])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool: Debian's prometheus has it")
def test_prometheus_takes_the_faster_rules(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump(compressed(SHIPPED, 60.0)))
    done = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "expression",
    [
        "max_over_time(eelgrid_x[1h:1m]) > 0",
        "eelgrid_x @ 1600000000",
        "predict_linear(eelgrid_x[1h], 3600) > 0",
        "deriv(eelgrid_x[1h]) > 0",
        "max(eelgrid_x_seconds) > 5",
        "eelgrid_x_seconds / 60 > 5",
        "5 < eelgrid_x_seconds",
        "eelgrid_x_seconds > eelgrid_y_seconds",
        "rate(eelgrid_x_seconds_total[5m]) > 0.5",
        "time() - eelgrid_start > 5",
        "time() > 5",
        "node_load1 > 5",
        "eelgrid_x[5min]",
        "eelgrid_x[1w]",
        "eelgrid_x > 5m",
        "increase(eelgrid_x[5ms]) > 0",
        "eelgrid_x ^ 2",
    ],
)
def test_what_is_not_understood_is_refused(expression):
    with pytest.raises(NotUnderstood):
        compressed_expression(expression, 60.0)


@pytest.mark.parametrize(
    "change", [{"keep_firing_for": "5m"}, {"for": "a while"}, {"for": "1d2w"}], ids=lambda change: next(iter(change))
)
def test_a_field_that_is_not_understood_is_refused(change):
    rule = {"alert": "A", "expr": "eelgrid_x > 0", **change}
    with pytest.raises(NotUnderstood):
        compressed({"groups": [{"name": "g", "rules": [rule]}]}, 60.0)
    with pytest.raises(NotUnderstood):
        compressed({"groups": [{"name": "g", "limit": 5, "rules": []}]}, 60.0)
