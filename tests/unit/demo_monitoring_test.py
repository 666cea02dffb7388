"""The Prometheus of the kept demo: its configuration, checked by promtool where there is one, and its node."""

import json
import shutil
import subprocess

import pytest
import yaml
from tests.deploy_rig import CHART

from eelgrid_agent.simulation.spec import load_fleet
from eelgrid_controller.demo import run
from eelgrid_controller.demo.run import _window_s

JOBS = {"controller": ["127.0.0.1:1"], "agent": ["127.0.0.1:2", "127.0.0.1:3"]}


def test_the_jobs_have_the_charts_names_and_keep_our_labels():
    told = yaml.safe_load(run.prometheus_configuration(JOBS, None))
    assert {job["job_name"]: job["static_configs"][0]["targets"] for job in told["scrape_configs"]} == JOBS
    assert all(job["honor_labels"] for job in told["scrape_configs"])
    assert told["rule_files"] == []


def test_the_rules_are_the_charts():
    assert run.alert_rules_file() == CHART / "files" / "rules.yaml"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool: apt-get install prometheus")
def test_promtool_takes_it(tmp_path):
    path = tmp_path / "prometheus.yaml"
    path.write_text(run.prometheus_configuration(JOBS, run.alert_rules_file()))
    done = subprocess.run(["promtool", "check", "config", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


async def test_nobody_there_is_not_ready(monkeypatch):
    monkeypatch.setattr(run, "_READY_S", 0.3)
    assert not await run.wait_for_prometheus("127.0.0.1:1")


def test_its_node_is_one_that_can_be_simulated_and_has_room_for_its_work(tmp_path):
    run.write_sample_node(tmp_path / "node.json")
    (node,) = load_fleet(tmp_path / "node.json")
    assert (
        json.loads((tmp_path / "node.json").read_text())["nodes"][0]["name"] == node.node_name == run.SAMPLE_NODE_NAME
    )
    whole = [gpu for gpu in node.gpus if gpu.mig is None]
    asked = [request.spec.request for request in run.sample_submissions()]
    assert sum(one.gpu_count * one.gpu_milli for one in asked) <= 1000 * len(whole)
    assert sum(one.cpu_milli for one in asked) <= node.cpu_milli


@pytest.mark.parametrize(("nodes", "length_s"), [(1, 5.0), (400, 20.0), (1213, 60.0), (10_000, 60.0)])
def test_windows_are_short_in_a_small_fleet(nodes, length_s):
    assert _window_s(nodes) == length_s
