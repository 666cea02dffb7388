"""eelctl queue against a served fake: the order, who waits for what, sums, and what would help."""

import json
import re
from dataclasses import replace

import pytest
import yaml
from tests.builders.cluster import build_request
from tests.tables import strip_table

from eelgrid_protos import faults
from eelgrid_protos.messages import DeadlineBreach, JobDeadline, Workload, WorkloadPhase

GPUS = "gpu_count: no node has enough whole GPUs free"
WATTS = "budget: waits for watts of rack r1"
HOUR_NS = 3_600_000_000_000
NOW_NS = 1_800_000_000_000_000_000


def waiting(name, ago_ns, reason, *, gpus=1, **spec):
    asked = build_request(name=name, cpu=2, gpus=gpus, milli=1000, **{"namespace": "ml", **spec}).spec
    return Workload(
        workload_id=name, spec=asked, phase=WorkloadPhase.PENDING, reason=reason, submitted_ns=NOW_NS - ago_ns
    )


@pytest.fixture
def crowd(fake):
    """Four that wait, in the order of their submission, and one that runs."""
    rows = (
        waiting("old", 50 * HOUR_NS, GPUS, gpus=4, queue="night"),
        waiting("mid", 3 * HOUR_NS, WATTS, replicas=2, user="ada"),
        waiting("urgent", HOUR_NS, GPUS, namespace="prod", priority=9),
        waiting("new", HOUR_NS // 40, GPUS),
        replace(waiting("runs", HOUR_NS, ""), phase=WorkloadPhase.PLACED),
    )
    fake.workloads.update({row.workload_id: row for row in rows})
    fake.now_ns = NOW_NS


def test_what_waits_in_its_order_and_what_would_help_the_first_of_each_reason(eelctl, crowd, fake):
    assert eelctl("queue").stdout == strip_table("""
PLACE  ID      PRIORITY  NAMESPACE  QUEUE  REPLICAS  EACH                  WAITS  STARTS  REASON
    1  urgent         9  prod       -             1  2 CPU, 1 GiB, 1 GPU  60 min  -       gpu_count: no node has enough whole GPUs free
    2  old            0  ml         night         1  2 CPU, 1 GiB, 4 GPU     2 d  -       gpu_count: no node has enough whole GPUs free
    3  mid            0  ml         -             2  2 CPU, 1 GiB, 1 GPU     3 h  -       budget: waits for watts of rack r1
    4  new            0  ml         -             1  2 CPU, 1 GiB, 1 GPU    90 s  -       gpu_count: no node has enough whole GPUs free

gpu_count: 3 wait, with 6 GPUs and 6 CPUs, the longest for 2 d; no node has enough whole GPUs free.
  urgent, the first of them: free 1 T4, or let gpu_models name A10 too

budget: 1 waits, with 2 GPUs and 4 CPUs, the longest for 3 h; waits for watts of rack r1.
  mid, the first of them: free 1 T4, or let gpu_models name A10 too
""")
    assert fake.calls.count("explain_workload") == 2, "once for each reason"


def test_deadlines_are_shown_where_there_are_any(eelctl, crowd, fake):
    for name, deadline, breach in (
        ("old", JobDeadline(end_ns=NOW_NS + 5 * HOUR_NS), None),
        ("mid", JobDeadline(end_ns=NOW_NS - 1), DeadlineBreach(time_ns=1, cause="node: n is lost")),
        ("new", JobDeadline(end_ns=NOW_NS + HOUR_NS // 2, best_effort=True), None),
    ):
        row = fake.workloads[name]
        spec = replace(row.spec, deadline=deadline)
        fake.workloads[name] = replace(row, spec=spec, deadline_breach=breach)
    header, *rows = eelctl("--no-headers", "queue").stdout.splitlines()
    assert [line.split("gpu_count:")[0].split("budget:")[0].split()[-2:] for line in (header, *rows)] == [
        ["-", "-"],
        ["5", "h"],
        ["passed", "(broken)"],
        ["(best", "effort)"],
    ]


def test_places_that_the_controller_tells_come_before_priority_and_submission(eelctl, crowd, fake):
    for place, name in enumerate(("new", "old"), 1):
        fake.workloads[name] = replace(fake.workloads[name], queue_position=place)
    lines = eelctl("queue", "--no-headers").stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [["1", "new"], ["2", "old"], ["3", "urgent"], ["4", "mid"]]


def test_scripts_get_rows_alone_and_nobody_is_asked_what_would_help(eelctl, crowd, fake):
    lines = eelctl("queue", "--no-headers", "--limit", "3").stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [["1", "urgent"], ["2", "old"], ["3", "mid"]]
    assert "explain_workload" not in fake.calls


def test_wide(eelctl, crowd):
    titles, first, *_ = eelctl("queue", "-o", "wide", "--namespace", "prod").stdout.splitlines()
    assert titles.split()[:9] == ["PLACE", "ID", "NAME", "PRIORITY", "NAMESPACE", "QUEUE", "USER", "KIND", "REPLICAS"]
    assert "2027-01-15T07:00:00Z  60 min" in first


@pytest.mark.parametrize(
    ("filters", "places"),
    [
        (("--namespace", "ml"), [2, 3, 4]),
        (("--queue", "night"), [2]),
        (("--user", "ada"), [3]),
        (("--reason", "budget"), [3]),
        (("--namespace", "ml", "--reason", "gpu_count", "--limit", "1"), [2]),
    ],
)
def test_a_filter_keeps_the_places_of_the_whole_queue(eelctl, crowd, filters, places):
    found = json.loads(eelctl("queue", *filters, "-o", "json").stdout)
    assert [row["place"] for row in found["waiting"]] == places


def test_work_that_waits_for_cpu_and_memory_waits_for_each(eelctl, fake):
    both = waiting("both", HOUR_NS, "cpu+memory: nodes with free GPUs lack CPU or memory")
    fake.workloads.update({"both": both, "gpus": waiting("gpus", HOUR_NS, GPUS)})
    fake.now_ns = NOW_NS
    for name in ("cpu", "memory", "cpu+memory"):
        found = json.loads(eelctl("queue", "--reason", name, "-o", "json").stdout)
        assert [row["constraint"] for row in found["waiting"]] == ["cpu+memory"]
        assert [row["reason"] for row in found["reasons"]] == ["cpu+memory"]


def test_json_and_yaml_have_everything(eelctl, crowd):
    found = json.loads(eelctl("queue", "-o", "json", "--no-headers").stdout)
    assert found == yaml.safe_load(eelctl("queue", "-o", "yaml").stdout)
    first = found["waiting"][0]
    assert (first["place"], first["waits_s"], first["constraint"]) == (1, 3600.0, "gpu_count")
    assert first["workload"]["workload_id"] == "urgent"
    assert found["reasons"][1] == {
        "reason": "budget",
        "workloads": 1,
        "replicas": 2,
        "gpu_milli": 2000,
        "cpu_milli": 4000,
        "memory_bytes": 2**31,
        "longest_s": 10_800.0,
        "first": "mid",
        "reasons": {"budget": 1},
        "remedy": "free 1 T4, or let gpu_models name A10 too",
    }


def test_sums(eelctl, crowd, fake):
    assert eelctl("queue", "--by", "namespace").stdout == strip_table("""
NAMESPACE  WORKLOADS  REPLICAS  GPUS  LONGEST  WAIT FOR
prod               1         1     1   60 min  gpu_count 1
ml                 3         4     7      2 d  gpu_count 2, budget 1
""")
    assert eelctl("queue", "--by", "queue", "--namespace", "ml", "-o", "wide").stdout == strip_table("""
QUEUE  WORKLOADS  REPLICAS  GPUS  CPU  MEMORY  LONGEST  FIRST  WAIT FOR
night          1         1     4    2   1 GiB      2 d  old    gpu_count 1
-              2         3     3    6   3 GiB      3 h  mid    budget 1, gpu_count 1
""")
    assert [row["reason"] for row in json.loads(eelctl("queue", "--by", "reason", "-o", "json").stdout)] == [
        "gpu_count",
        "budget",
    ]
    assert "explain_workload" not in fake.calls


def test_an_empty_queue_says_so(eelctl):
    done = eelctl("queue")
    assert (done.stdout, done.stderr) == ("", "nothing waits\n")
    assert json.loads(eelctl("queue", "-o", "json").stdout) == {"waiting": [], "reasons": []}
    assert json.loads(eelctl("queue", "--by", "user", "-o", "json").stdout) == []


@pytest.mark.parametrize("sums", [(), ("--by", "user")])
def test_where_nothing_matches_it_is_not_said_that_nothing_waits(eelctl, crowd, sums):
    unknown = eelctl("queue", "--reason", "sunshine", *sums)
    assert (unknown.stdout, unknown.stderr) == (
        "",
        "nothing waits for 'sunshine'; workloads wait for budget, gpu_count\n",
    )
    done = eelctl("queue", "--user", "nobody-here", *sums)
    assert done.stdout == ""
    assert re.fullmatch(r"no pending workload matches; without filters there are \d+\n", done.stderr)


def test_one_that_went_meanwhile_is_passed_over(eelctl, crowd, fake):
    fake.failures = [None, None, faults.NotFound("gone"), None]
    text = eelctl("queue").stdout
    assert "urgent, the first of them" not in text
    assert "mid, the first of them" in text
