"""The demo that is kept: everything it prints an address of answers, the ledger has joules, and Ctrl-C ends it all."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request

import psutil
import pytest
from tests.waiting import poll_until

pytestmark = pytest.mark.usefixtures("compiled_kernels")

SMALL = ("--nodes", "24", "--tasks", "120", "--trace", "generated", "--no-gpu", "--out", "demo", "--keep")
START_S, WAIT_S = 150.0, 60.0


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """What the kept demo printed; ended by Ctrl-C, and whatever a test did."""
    folder = tmp_path_factory.mktemp("demo")
    demo = psutil.Popen(
        [sys.executable, "-m", "eelgrid_controller.demo", *SMALL],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
    )
    timer = time.monotonic() + START_S
    said = []
    try:
        for line in demo.stdout:
            said.append(line)
            assert time.monotonic() < timer, "".join(said)
            if "eelctl policy get" in line:
                break
        assert demo.poll() is None, "".join(said)
        family = demo.children(recursive=True)
        yield "".join(said)
        # Tests come in any order, so Ctrl-C is here: it ends everything.
        assert len(family) >= 2
        demo.send_signal(signal.SIGINT)
        out, _ = demo.communicate(timeout=60)
        assert demo.returncode == 0, out
        assert [process for process in family if process.is_running()] == []
    finally:
        if demo.poll() is None:
            for process in (*demo.children(recursive=True), demo):
                process.kill()
            demo.communicate(timeout=10)


def page(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def address_of(said, name):
    return re.search(rf"^  {re.escape(name)} +(\S+)$", said, re.MULTILINE)[1]


def eelctl(said, *arguments):
    command = [sys.executable, "-m", "eelgrid_controller.cli", "--controller", address_of(said, "controller, gRPC")]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_every_address_answers(kept):
    said = kept
    assert "eelgrid_state_revision" in page(address_of(said, "controller, metrics"))
    assert "eelgrid_agent_nodes 24" in page(address_of(said, "fleet, metrics"))

    def devices():
        return page(address_of(said, "node, metrics")).count("\neelgrid_gpu_power_watts{") == 4

    poll_until(devices, "four devices on the page of the one node")
    if "live page" in said:
        assert "<html" in page(address_of(said, "live page")).lower()


def test_the_ledger_has_the_workloads_joules(kept):
    said = kept

    def spent():
        asked = ("energy", "--since", "1h", "--by", "workload", "--rows", "1000")
        found = json.loads(eelctl(said, *asked, "-o", "json").stdout)
        names = {group["workload"] for group in found["groups"]}
        # The two that share a device of the node are named, too, though nobody can see whose its process is.
        return found if len(names) >= 5 and names >= {"demo-train", "demo-serve-a", "demo-serve-b"} else None

    found = poll_until(spent, "joules of those on the node that shows everything", within_s=WAIT_S)
    strangers = [group for group in found["groups"] if not group["workload"].startswith(("openb-pod-", "demo-"))]
    assert strangers == []
    assert all(group["energy_j"] > 0 for group in found["groups"])
    parts_j = sum(group["energy_j"] for group in found["groups"])
    others_j = sum(found[name]["energy_j"] for name in ("left_out", "unallocated", "unattributed"))
    assert parts_j + others_j == pytest.approx(found["measured_j"], rel=1e-9)


def test_work_on_the_node_that_shows_everything(kept):
    said = kept
    for name in ("demo-train", "demo-serve-a", "demo-serve-b"):
        told = json.loads(eelctl(said, "get", name, "-o", "json").stdout)
        assert {place["node_name"] for place in told["placements"]} == {"demo-node"}, told

    def spent():
        done = eelctl(said, "energy", "--where", "namespace=demo", "--by", "workload", "-o", "json")
        return {row["workload"] for row in json.loads(done.stdout)["groups"]} >= {"demo-train", "demo-serve-a"}

    poll_until(spent, "joules of the node's own work", within_s=WAIT_S)
    assert "demo-train" in eelctl(said, "energy", "--since", "1h").stdout


def test_a_doctor_finds_nothing_wrong_with_it(kept):
    said = kept
    metrics = address_of(said, "controller, metrics")

    def well():
        done = eelctl(said, "doctor", "--only", "controller", "--metrics", metrics, "-o", "json")
        return done if done.returncode == 0 else None

    findings = json.loads(poll_until(well, "a doctor who is content").stdout)
    assert {one["check"] for one in findings} >= {
        "controller",
        "agents",
        "telemetry",
        "plans",
        "ledger",
        "journal",
        "objectives",
    }
    assert [one for one in findings if one["status"] == "fail"] == []
    assert "energy today" in eelctl(said, "top").stdout


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus: apt-get install prometheus")
def test_prometheus_scrapes_both_with_our_rules(kept):
    said = kept
    at = address_of(said, "Prometheus").rstrip("/")

    def scraped():
        targets = json.loads(page(f"{at}/api/v1/targets"))["data"]["activeTargets"]
        return targets if {target["health"] for target in targets} == {"up"} else None

    targets = poll_until(scraped, "both targets are up")
    assert sorted(target["labels"]["job"] for target in targets) == ["agent", "agent", "controller"]
    groups = json.loads(page(f"{at}/api/v1/rules"))["data"]["groups"]
    assert groups, "the chart's rules are loaded"

    def gpus():
        return json.loads(page(f"{at}/api/v1/query?query=count(eelgrid_gpu_power_watts)"))["data"]["result"]

    assert int(poll_until(gpus, "the power of the node's GPUs")[0]["value"][1]) == 4
