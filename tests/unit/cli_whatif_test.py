"""eelctl whatif and capacity: what is asked, how the answer reads, and every mistake with its remedy."""

import json
import re
from dataclasses import replace

import pytest
import yaml
from tests.builders.cluster import build_core, build_node, build_request
from tests.fakes.operators import FakeOperators

from eelgrid_controller.core.core import Core
from eelgrid_controller.whatif.scenarios import ScenarioContext, plan_capacity, run_what_if
from eelgrid_protos import catalogue
from eelgrid_protos.messages import (
    OBJECTIVES,
    AddNodes,
    BudgetScope,
    CancelWorkloads,
    DrainNodes,
    NodeShape,
    PlaceAnew,
    PowerBudget,
    SetPowerBudgets,
    SetWeights,
    SubmitCopies,
    WhatIfRequest,
    WhatIfResponse,
)
from eelgrid_protos.plain_messages import from_plain

BENCH = ScenarioContext(lambda state: Core(state, catalogue.load_catalogue()), catalogue.load_catalogue(), now_ns=9)


class Imaginer(FakeOperators):
    """The fake's calls, with what-if answered by the real thing on a small cluster."""

    asked: WhatIfRequest

    def __init__(self):
        super().__init__()
        self.core = build_core(build_node("a"), build_node("b"))
        for _ in range(2):
            self.core.submit(build_request(gpus=2, name="train"), now_ns=2)
        self.core.submit(build_request(gpus=1, name="late"), now_ns=3)
        self.workloads.update(self.core.state.workloads)

    async def what_if(self, request, context):
        self._begin("what_if")
        self.asked = request
        return run_what_if(self.core.state.copy(), request, BENCH)

    async def plan_capacity(self, request, context):
        self._begin("plan_capacity")
        return plan_capacity(self.core.state, request, BENCH)


@pytest.fixture
def fake():
    return Imaginer()


def test_flags_become_changes_in_their_order(eelctl, fake):
    result = eelctl.run(
        "whatif",
        "--gpus",
        1,
        "--cpu",
        2,
        "--copies",
        3,
        "--anew",
        "--cancel",
        "w-3",
        "--objective",
        "energy",
        "--weight",
        "power=2",
        "--add",
        "2:H100-SXM5-80GB:8",
        "--node-cpu",
        "96",
        "--node-memory",
        "1TiB",
        "--add-like",
        "1:a",
        "--remove",
        "b",
        "--drain",
        "a",
    )
    assert result.exit_code == 0, result.output
    base = OBJECTIVES["energy"]
    submitted = build_request(gpus=1, cpu=2, memory_gib=0, name="new").spec
    assert [change.change for change in fake.asked.changes] == [
        DrainNodes(node_names=("a",)),
        DrainNodes(node_names=("b",), remove=True),
        AddNodes(shape=NodeShape(gpu="H100-SXM5-80GB", gpu_count=8, cpu_milli=96_000, memory_bytes=2**40), count=2),
        AddNodes(shape=NodeShape(like_node="a"), count=1),
        SetWeights(weights=replace(base, power=2.0)),
        CancelWorkloads(workload_ids=("w-3",)),
        PlaceAnew(),
        SubmitCopies(spec=submitted, copies=3),
    ]


def test_a_budget_is_changed_among_those_in_force(eelctl, fake):
    held = (
        PowerBudget(scope=BudgetScope.RACK, name="r1", limit_w=5e3),
        PowerBudget(scope=BudgetScope.CLUSTER, limit_w=9e4),
    )
    fake.policy = replace(fake.policy, budgets=held)
    result = eelctl.run("whatif", "--budget", "rack:r1=none", "--budget", "node:n7=5600W", "--objective", "energy")
    assert result.exit_code == 0, result.output
    assert [change.change for change in fake.asked.changes] == [
        SetWeights(objective="energy"),
        SetPowerBudgets(budgets=(held[1], PowerBudget(scope=BudgetScope.NODE, name="n7", limit_w=5600.0))),
    ]


def test_a_file_holds_any_sequence(eelctl, fake, tmp_path):
    sequence, jobs = tmp_path / "changes.yaml", tmp_path / "jobs.yaml"
    sequence.write_text("- PlaceAnew:\n- DrainNodes: {node_names: [a]}\n- PlaceAnew: {}\n")
    jobs.write_text("name: one\nrequest: {gpus: 1}\n---\nname: two\nrequest: {cpu: 4}\n")
    result = eelctl.run("whatif", "--changes", sequence, "-f", jobs, "--copies", 2)
    assert result.exit_code == 0, result.output
    kinds = [type(change.change).__name__ for change in fake.asked.changes]
    assert kinds == ["PlaceAnew", "DrainNodes", "PlaceAnew", "SubmitCopies", "SubmitCopies"]
    assert fake.asked.changes[-1].change.copies == 2


def test_the_answer_as_table_json_and_yaml(eelctl):
    table = eelctl.run("whatif", "--drain", "a").output
    for line in (
        "Tried on a copy of revision 11; the cluster is unchanged.",
        "nodes ready 2 1 -1",
        "workloads waiting 1 2 +1",
        " 1 workload would lose its place and wait",
        "w-1 displaced a - gpu_count: no node has enough whole GPUs free",
    ):
        assert line in re.sub(" +", " ", table)
    as_json = json.loads(eelctl.run("-o", "json", "whatif", "--drain", "a").output)
    assert yaml.safe_load(eelctl.run("whatif", "--drain", "a", "-o", "yaml").output) == as_json
    answer = from_plain(WhatIfResponse, as_json)
    assert answer.after.nodes_ready == 1


def test_a_capacity_plan(eelctl):
    result = eelctl.run("capacity", "--node-like", "a")
    assert "1 node is needed for 1 workload; with one less, 1 would wait." in result.output
    result = eelctl.run("capacity", "--node", "openb-g2:2", "--gpus", 2, "--copies", 3)
    assert "4 nodes are needed for 3 workloads; with one less, 1 would wait." in result.output
    assert "1 pending workloads were tried first" in result.output
    assert (
        "Even with 2 such nodes, 1 workload"
        in eelctl.run("capacity", "--node", "openb-g2:2", "--gpus", 2, "--copies", 2, "--most", 2).output
    )
    plain = json.loads(eelctl.run("-o", "json", "capacity", "--node-like", "a").output)
    assert (plain["nodes"], plain["wanted"]) == (1, 1)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("whatif",), 2, "name at least one change"),
        (("whatif", "--budget", "5kW"), 2, "write cluster=200kW, rack:NAME=20kW or node:NAME=5600W"),
        (("whatif", "--add", "3:T4"), 2, "write MODEL:COUNT, for example H100-SXM5-80GB:8"),
        (("whatif", "--add", "T4:8"), 2, "begin with the number of nodes"),
        (("whatif", "--add-like", "0:a"), 2, "begin with the number of nodes"),
        (("whatif", "--weight", "speed=2"), 2, "use one of power, fragmentation_w, stranding_w"),
        (("capacity",), 2, "either --node MODEL:COUNT or --node-like NODE"),
        (("capacity", "--node", "T4:1", "--node-like", "a"), 2, "either --node MODEL:COUNT or --node-like NODE"),
        (("whatif", "--drain", "z"), None, "no node is called 'z'"),
        (("whatif", "--add", "1:T5:8"), None, "did you mean T4?"),
    ],
)
def test_mistakes(eelctl, arguments, code, said):
    result = eelctl.run(*arguments)
    assert said in result.stderr.replace("\n", " ")
    assert result.exit_code == code if code else result.exit_code > 0
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not YAML"),
        ("a: 1", "is not a list"),
        ("- MoveBudget: {rack: r1}", "use one of DrainNodes, AddNodes"),
        ("- 5", "a change is not a mapping"),
        ("- DrainNodes: {node: a}", "is no field here"),
    ],
)
def test_a_wrong_file_is_refused_before_anything_is_asked(eelctl, fake, tmp_path, text, said):
    file = tmp_path / "changes.yaml"
    file.write_text(text)
    result = eelctl.run("whatif", "--changes", file)
    assert result.exit_code > 0
    assert said in result.stderr
    assert fake.calls == []


def test_a_file_of_changes_has_amounts_as_a_workload_file(eelctl, fake, tmp_path):
    file = tmp_path / "changes.yaml"
    file.write_text("- SubmitCopies: {copies: 2, spec: {name: a, request: {gpus: 1, cpu: 2.5, memory: 4GiB}}}\n")
    eelctl.run("whatif", "--changes", file)
    (change,) = fake.asked.changes
    request = change.change.spec.request
    assert (request.cpu_milli, request.memory_bytes, request.gpu_count, request.gpu_milli) == (2500, 2**32, 1, 1000)
    file.write_text("- SubmitCopies: {spec: {name: a, request: {cpu: much}}}\n")
    assert "write 2.5 or 2500m" in eelctl.run("whatif", "--changes", file).stderr
