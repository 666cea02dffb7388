"""eelctl's reading commands against a served fake: golden tables, shapes, pages."""

import json
from dataclasses import replace

import pytest
import yaml
from click.testing import CliRunner
from tests.fakes.operators import a_node
from tests.fakes.spent import NOTHING_SPENT
from tests.tables import strip_table

from eelgrid_controller.cli.__main__ import cli
from eelgrid_protos.messages import EnergyGroup, EnergySpent, GpuLink, Node, NodeState, Workload
from eelgrid_protos.plain_messages import from_plain


@pytest.fixture
def some_work(eelctl):
    eelctl(
        "submit",
        "--id",
        "bert-1",
        "--name",
        "bert",
        "--kind",
        "inference_service",
        "--cpu",
        "8",
        "--gpu-share",
        "0.5",
        "--memory",
        "32GiB",
        "--gpu-model",
        "A10,T4",
        "--user",
        "ada",
        "--label",
        "team=nlp",
    )
    eelctl("submit", "--id", "etl-1", "--name", "etl", "--cpu", "500m", "--priority", "3", "--namespace", "data")


def test_nodes(eelctl):
    assert eelctl("nodes").stdout == strip_table("""
NODE    STATE  POOL  MODEL   GPUS   CPU       MEMORY  WORKLOADS   POWER  AGE
node-0  ready  a     T4     0.5/2  0/32  0 B/128 GiB          0  80.0 W    -
""")


def test_nodes_wide_without_headers(eelctl, fake):
    fake.nodes = [a_node("n", gpus=0, workloads=2)]
    assert eelctl("--no-headers", "nodes", "-o", "wide").stdout == strip_table("""
n  ready  a  -  -  0/32  0 B/128 GiB  2  -  -  0/0  0  0  580.1  -  no  -  -
""")


def test_a_node_that_is_ahead_of_the_journal_shows_until_it_is_reconciled(eelctl, fake):
    fake.nodes = [replace(a_node("n", gpus=0), ahead_epoch=9, unknown_workload_ids=("lost",))]
    assert "ready, ahead of journal" in eelctl("nodes").stdout
    assert "1 workload released: lost" in eelctl("reconcile", "n", code=5).stderr
    assert "n: holds only what the journal knows" in eelctl("reconcile", "n", "--yes").stdout
    assert "ahead" not in eelctl("nodes").stdout


def test_topology_shows_links_numa_nodes_and_the_place(eelctl, fake):
    fake.nodes = [a_node("n-1", gpus=3), a_node("n", gpus=3)]
    here = fake.nodes[1].inventory
    gpus = tuple(replace(gpu, numa_node=[0, 0, None][gpu.index], pci_bus_id=f"0:{gpu.index}") for gpu in here.gpus)
    links = (GpuLink(one=0, other=1, ancestor=10, nvlinks=2), GpuLink(one=2, other=0, ancestor=50))
    fake.nodes[1] = Node(
        inventory=replace(here, gpus=gpus, links=links, topology=("zone-a", "rack-7")), state=NodeState.READY
    )
    assert eelctl("topology", "n").stdout == strip_table("""
node n at zone-a/rack-7
      GPU0  GPU1  GPU2  NUMA  PCI
GPU0  X     NV2   SYS   0     0:0
GPU1  NV2   X     -     0     0:1
GPU2  SYS   -     X     -     0:2
NV2 two NVLinks, PSB same board, PIX one PCIe switch, PXB several switches, PHB host bridge, NODE same processor, SYS across processors
""")
    assert (
        eelctl("--no-headers", "nodes", "-o", "wide", "--name", "n")
        .stdout.splitlines()[1]
        .endswith("zone-a/rack-7  NV0-2")
    )
    assert "the driver reports no links" in eelctl("topology", "n-1").stdout
    assert "no node is called 'm'" in eelctl("topology", "m", code=4).output


def test_gpus_show_a_missing_reading_as_a_dash(eelctl):
    assert eelctl("gpus").stdout == strip_table("""
NODE    GPU  STATE  MODEL  ALLOCATED   POWER    BUSY    MEMORY  TEMP  WORKLOADS  NAME  USER
node-0    0  ready  T4        50.0 %  40.0 W  25.0 %  -/16 GiB     -          0  -     -
node-0    1  ready  T4         0.0 %       -       -  -/16 GiB     -          0  -     -
""")


def test_gpus_free(eelctl):
    rows = json.loads(eelctl("gpus", "--free", "60%", "-o", "json").stdout)
    assert [row["gpu"]["index"] for row in rows] == [1]
    assert "power_w" not in rows[0]


def test_workloads(eelctl, some_work, fake):
    fake.workloads["bert-1"] = replace(fake.workloads["bert-1"], power_w=41.5)
    assert eelctl("workloads").stdout == strip_table("""
ID      NAME  USER  PHASE   GPUS  AGE   POWER  NODE    REASON
bert-1  bert  ada   placed   0.5  0 s  41.5 W  node-0  -
etl-1   etl   -     placed     -  0 s       -  node-0  -
""")
    wide = eelctl("workloads", "-o", "wide").stdout
    assert "8 CPU, 32 GiB, 0.5 GPU (A10|T4)" in wide
    assert "inference_service" in wide


def test_workloads_filters_and_limit(eelctl, some_work, fake):
    assert eelctl("workloads", "--name", "etl", "--no-headers").stdout.split()[0] == "etl-1"
    assert eelctl("workloads", "--limit", "1", "--no-headers").stdout.count("\n") == 1
    nothing = eelctl("workloads", "--phase", "cancelled")
    assert nothing.stdout == ""
    assert "no workload matches" in nothing.stderr
    assert json.loads(eelctl("workloads", "--phase", "cancelled", "-o", "json").stdout) == []


def test_every_page_is_fetched(eelctl, fake):
    fake.nodes = [a_node(f"n{i:04d}", gpus=1) for i in range(2345)]
    assert eelctl("nodes", "--no-headers").stdout.count("\n") == 2345
    assert fake.calls.count("list_nodes") == 3
    assert eelctl("nodes", "--no-headers", "--limit", "1001").stdout.count("\n") == 1001
    assert fake.calls.count("list_nodes") == 5


def test_watch_filters_and_prints_as_it_comes(eelctl, some_work):
    lines = eelctl("workloads", "-w", "--user", "ada").stdout.splitlines()
    assert lines[0].split() == ["ID", "NAME", "USER", "PHASE", "GPUS", "AGE", "POWER", "NODE", "REASON"]
    assert [line.split()[0] for line in lines[1:]] == ["bert-1"]
    later = eelctl("workloads", "-w", "--after", "1", "-o", "json").stdout.splitlines()
    assert [json.loads(line)["workload_id"] for line in later] == ["etl-1"]
    documents = list(yaml.safe_load_all(eelctl("workloads", "-w", "-o", "yaml").stdout))
    assert [document["workload_id"] for document in documents] == ["bert-1", "etl-1"]


def test_watch_ends_at_its_limit_without_waiting_for_more(eelctl, some_work, fake):
    fake.watch_closes = False
    assert eelctl("workloads", "-w", "--limit", "2", "--no-headers").stdout.count("\n") == 2


def test_get_in_words_and_in_shapes(eelctl, some_work, fake):
    assert eelctl("get", "bert-1").stdout == strip_table("""
bert-1: placed
  name       bert (inference_service), priority 0
  charged    namespace default, user ada
  owner      ada
  asks for   1 x 8 CPU, 32 GiB, 0.5 GPU (A10|T4)
  labels     team=nlp
  replica 0  node-0, GPU 0
""")
    for output, read in (("json", json.loads), ("yaml", yaml.safe_load)):
        plain = read(eelctl("get", "bert-1", "-o", output).stdout)
        assert from_plain(Workload, plain) == fake.workloads["bert-1"]


def test_cancel(eelctl, some_work):
    refused = eelctl("cancel", "bert-1", "etl-1", code=5).stderr
    assert "Cancelling 2 workloads (bert-1, etl-1) needs a confirmation" in refused
    assert "add --yes" in refused
    assert eelctl("cancel", "bert-1", "etl-1", "--yes").stdout == "bert-1: cancelled\netl-1: cancelled\n"


def test_explain_a_placement(eelctl, some_work):
    assert eelctl("explain", "bert-1").stdout == strip_table("""
bert-1 (inference_service bert) is placed.
It belongs to ada, in the namespace default.
It asks for 1 x 8 CPU, 32 GiB, 0.5 GPU (A10|T4).

Replica 0 is on node-0, GPU 0. Feasible: 2 nodes.
       3 nodes ruled out by gpu model
        1 node ruled out by cpu
  Cost in watts-equivalent, lowest first (* chosen):
     NODE    GPU      COST      POWER  FRAGMENTATION  WORSE BY  BECAUSE OF
  *  node-0    0   57.50 W   +60.00 W        -2.50 W    0.00 W  -
     node-1    1  121.00 W  +120.00 W        +1.00 W   63.50 W  power +60.00 W, fragmentation +3.50 W
""")


def test_explain_leads_to_the_page_where_people_see_it(eelctl, some_work):
    for page in ("https://grid.example:8443", "https://grid.example:8443/"):
        text = eelctl("--page", page, "explain", "bert-1").stdout
        assert text.endswith("\n\nOn the live page: https://grid.example:8443/#/workload/bert-1\n")
    assert "page" not in eelctl("explain", "bert-1").stdout


def test_explain_what_waits(eelctl, fake):
    fake.fits = lambda request: False
    eelctl("submit", "--id", "w", "--name", "w", "--gpus", "1")
    text = eelctl("explain", "w").stdout
    assert text.startswith("w (batch_job w) is pending: no free GPU\n")
    assert "Replica 0 is not placed. Feasible: 0 nodes." in text
    assert text.endswith("What would help: free 1 T4, or let gpu_models name A10 too\n")


def test_plan(eelctl):
    assert eelctl("plan", "node-0").stdout == strip_table("""
NODE    EPOCH  APPLIED  STATUS   MODE     LEASE  ASSIGNMENTS  SETTINGS  GPUS
node-0      4        -  waiting  observe   60 s            1         0   0.5
""")


def test_policy_get(eelctl):
    assert eelctl("policy", "get").stdout == strip_table("""
objective          balanced (revision 1)
  power            1
  fragmentation_w  0
  stranding_w      100
  lookahead        1
  scarcity_w       500
  stranding_full_w 2000
  locality_w       100
placement          eelgrid
lease              60 s
send interval      5 s
sample interval    1 s
backfill           easy, by stated run times and time limits
every other pool   observe: plans are shown, nothing is changed on the nodes
""")


def test_policy_set_changes_what_is_named_and_keeps_the_rest(eelctl, fake):
    eelctl(
        "policy",
        "set",
        "--yes",
        "--objective",
        "energy",
        "--pool-mode",
        "a=enforce",
        "--lease",
        "30",
        "--policy",
        "fgd",
    )
    eelctl("policy", "set", "--weight", "power=2", "--pool-mode", "b=observe", "--ahead", "--send-interval", "2")
    policy = fake.policy
    assert (policy.revision, policy.objective, policy.lease_s, policy.send_interval_s) == (3, "custom", 30.0, 2.0)
    assert (policy.weights.power, policy.weights.stranding_w) == (2.0, 50.0)
    assert policy.placement == "fgd"
    assert [(pool.pool, pool.mode.name) for pool in policy.pools] == [("a", "ENFORCE"), ("b", "OBSERVE")]


def test_top_in_a_pipe_is_one_plain_snapshot(eelctl, some_work):
    text = eelctl("top").stdout
    assert "\x1b" not in text
    for piece in (
        "GPUs allocated",
        "25.0 %",
        "321.0 W",
        "measured",
        "2 placed",
        "p99 1.20 ms",
        "nothing waits",
        "node-0",
    ):
        assert piece in text
    assert json.loads(eelctl("top", "--once", "-o", "json").stdout)["modelled_power_w"] == 321.0


def test_energy_is_a_table_whose_parts_add_up(eelctl, fake):
    group = EnergyGroup(values=("bert", "ml"), spent=EnergySpent(active_mj=1_500_000))
    fake.spent.answer = replace(NOTHING_SPENT, groups=(group,), unallocated=EnergySpent(bare_idle_mj=500_000))
    lines = eelctl("energy").stdout.splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["TITLE", "NAMESPACE"], ["bert", "ml"]]
    assert [line.split("  ")[0] for line in lines[2:4]] == ["(unallocated)", "TOTAL"]
    assert "2.00 kJ" in lines[3]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(eelctl, shell):
    script = eelctl("completion", shell).stdout
    assert "_EELCTL_COMPLETE" in script
    assert "eelctl" in script


def test_completion_answers():
    environment = {"_EELCTL_COMPLETE": "bash_complete", "COMP_WORDS": "eelctl po", "COMP_CWORD": "1"}
    result = CliRunner().invoke(cli, [], prog_name="eelctl", env=environment)
    assert result.output == "plain,policy\n"
    options = {"_EELCTL_COMPLETE": "bash_complete", "COMP_WORDS": "eelctl nodes --po", "COMP_CWORD": "2"}
    assert CliRunner().invoke(cli, [], prog_name="eelctl", env=options).output == "plain,--pool\n"
