"""eelctl replay as a process of its own, against a served fake."""

import json
import os
import time

import pytest
from tests.fakes.operators import FakeOperators, a_node, serving
from tests.fork_server import run_program

NODES = "sn,cpu_milli,memory_mib,gpu,model\nn0,64000,262144,2,T4\nn1,64000,262144,0,\n"
TASKS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli\n" + "".join(f"p{i:02d},1000,16,1,500\n" for i in range(20))


@pytest.fixture
def trace(tmp_path):
    (tmp_path / "nodes.csv").write_text(NODES)
    (tmp_path / "pods.csv").write_text(TASKS)
    return tmp_path


def replay(address, *arguments, cwd, yes=True):
    environment = {**os.environ, "EELGRID_CONTROLLER": address, "EELGRID_DATA": "", "NO_COLOR": "1"}
    words = ("replay", *(["--yes"] if yes else []), *arguments)
    return run_program("eelgrid_controller.cli", words, cwd=cwd, env=environment)


def test_a_list_is_submitted_once_however_often_it_is_replayed(trace):
    fake = FakeOperators(nodes=[a_node("n0"), a_node("n1")])
    with serving(fake) as address:
        first = replay(address, "--nodes", "nodes.csv", "--pods", "pods.csv", cwd=trace)
        assert first.returncode == 0, first.stderr
        again = replay(address, "--pods", "pods.csv", "-o", "json", cwd=trace)
    assert "answered   20 of 20" in first.stdout
    assert "placed     20, waiting 0, refused 0" in first.stdout
    assert "\x1b" not in first.stdout + first.stderr
    assert fake.submitted == [f"p{i:02d}" for i in range(20)]
    figures = json.loads(again.stdout)
    assert (figures["tasks"], figures["placed"], figures["repeats"]) == (20, 20, 0)


def test_limit_prefix_and_generated(trace):
    fake = FakeOperators()
    with serving(fake) as address:
        done = replay(address, "--trace", "generated", "--limit", "3", "--prefix", "again-", cwd=trace)
    assert done.returncode == 0, done.stderr
    assert "generated from the published marginals" in done.stdout
    assert fake.submitted == ["again-openb-pod-0000", "again-openb-pod-0001", "again-openb-pod-0002"]


def test_nodes_that_the_controller_lacks(trace):
    fake = FakeOperators(nodes=[a_node("n0")])
    with serving(fake) as address:
        done = replay(address, "--nodes", "nodes.csv", "--pods", "pods.csv", cwd=trace)
    assert done.returncode == 4
    assert "lacks 1 of the trace's 2 nodes, for example n1" in done.stderr
    assert "--fleet-out" in done.stderr
    assert fake.submitted == []


def test_refused_tasks_are_named(trace):
    (trace / "pods.csv").write_text(TASKS + "huge,5000000,1,0,0\n")
    with serving(FakeOperators()) as address:
        done = replay(address, "--pods", "pods.csv", cwd=trace)
    assert done.returncode == 1
    assert "refused huge: no node could ever hold this" in done.stderr
    assert "refused 1" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (("--pods", "bad.csv"), 5, "bad.csv, line 3, column gpu_milli"),
        (("--pods", "absent.csv"), 2, "does not exist"),
        (("--trace", "nowhere"), 4, "holds both files"),
        (("--trace", "generated", "--list", "gpushare40"), 4, "EELGRID_DATA"),
    ],
)
def test_a_trace_that_cannot_be_used(trace, arguments, code, complaint):
    (trace / "bad.csv").write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli\np0,1,1,0,0\np1,1,1,1,7000\n")
    fake = FakeOperators()
    with serving(fake) as address:
        done = replay(address, *arguments, cwd=trace)
    assert done.returncode == code, done.stderr
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
    assert fake.calls == []


def test_several_tasks_are_submitted_after_a_question(trace):
    fake = FakeOperators()
    with serving(fake) as address:
        asked = replay(address, "--pods", "pods.csv", cwd=trace, yes=False)
        one = replay(address, "--pods", "pods.csv", "--limit", "1", cwd=trace, yes=False)
    assert asked.returncode == 5
    assert f"Submitting 20 tasks to {address} (" in asked.stderr
    assert "trace: pods.csv" in asked.stderr
    assert "--yes" in asked.stderr
    assert one.returncode == 0, one.stderr
    assert fake.submitted == ["p00"]


def test_a_controller_that_does_not_answer_fails_at_once(trace):
    began_s = time.monotonic()
    done = replay("127.0.0.1:1", "--pods", "pods.csv", cwd=trace)
    assert done.returncode == 3
    assert "no controller answers" in done.stderr
    assert time.monotonic() - began_s < 60.0, "not the two minutes for which a restart is awaited"


def test_nobody_listens(trace):
    done = replay("127.0.0.1:1", "--nodes", "nodes.csv", "--pods", "pods.csv", cwd=trace)
    assert done.returncode == 3
    assert "no controller answers" in done.stderr


def test_the_fleet_file_is_what_the_agent_takes(trace):
    from eelgrid_agent.simulation.spec import load_fleet

    done = replay("127.0.0.1:1", "--nodes", "nodes.csv", "--fleet-out", "fleet.json", cwd=trace)
    assert done.returncode == 0, done.stderr
    specs = load_fleet(trace / "fleet.json")
    assert [(spec.node_name, spec.cpu_milli, len(spec.gpus)) for spec in specs] == [
        ("n0", 64_000, 2),
        ("n1", 64_000, 0),
    ]
    assert {gpu.model for gpu in specs[0].gpus} == {"T4"}
