"""eelctl jobs against a served fake: the table of jobs in every state, and what a document has of them."""

import json
from dataclasses import replace

import pytest
import yaml
from tests.builders.cluster import build_request
from tests.tables import strip_table

from eelgrid_protos.messages import (
    ArrayStatus,
    AttemptState,
    AttemptStatus,
    JobProgress,
    Mobility,
    ProcessSpec,
    Workload,
    WorkloadPhase,
    WorkloadView,
)

NOW_NS = 1_800_000_000_000_000_000
MINUTE_NS = 60_000_000_000


def job(name, phase=WorkloadPhase.PENDING, *, gpus=1, ago=10, spec=(), **changes):
    request = build_request(name=f"{name}-name", cpu=2, gpus=gpus, milli=1000 if gpus else 0).spec
    process = ProcessSpec(argv=("train",), working_directory="/home/ada", environment={"SECRET": "x"})
    spec = replace(request, process=process, mobility=Mobility.FIXED, **{"user": "ada", **dict(spec)})
    return Workload(
        workload_id=name, spec=spec, phase=phase, submitted_ns=NOW_NS - ago * MINUTE_NS, owner="certified", **changes
    )


def attempt(name, state=AttemptState.RUNNING, *, started=5, replica=0, **changes):
    started_ns = NOW_NS - started * MINUTE_NS if started else 0
    return AttemptStatus(workload_id=name, replica=replica, attempt=1, state=state, started_ns=started_ns, **changes)


@pytest.fixture
def crowd(fake):
    """Jobs in every state, an array, and a service that is no job."""
    placed, ended_ns = WorkloadPhase.PLACED, NOW_NS - MINUTE_NS
    rows = (
        job("waits", reason="gpu_count: no node has enough whole GPUs free", ago=3000),
        job("starts", placed, gpus=0),
        job("runs", placed, attempts=(attempt("runs", started=7), attempt("runs", started=9, replica=1)),
            spec={"replicas": 2, "user": ""}, progress=JobProgress(step=5, total=20, metric=0.25)),
        job("stops", placed, attempts=(attempt("stops"),), stopping_ns=NOW_NS, progress=JobProgress(step=7)),
        job("unstarted", placed, attempts=(attempt("unstarted", AttemptState.ENDED, started=0, reason="no program"),)),
        job("many", array=ArrayStatus(size=10, placed=2, pending=8, running_most=2), reason="array: waits"),
        job("good", WorkloadPhase.SUCCEEDED, ended_ns=ended_ns,
            attempts=(attempt("good", AttemptState.ENDED, exit_code=0, ended_ns=ended_ns),)),
        job("killed", WorkloadPhase.FAILED, ended_ns=ended_ns, reason="ended by SIGKILL",
            attempts=(attempt("killed", AttemptState.ENDED, signal=9, ended_ns=ended_ns),)),
        job("never", WorkloadPhase.CANCELLED, ended_ns=ended_ns),
        replace(job("service"), spec=build_request(name="service").spec),
    )  # fmt: skip
    fake.workloads.update({row.workload_id: row for row in rows})
    fake.now_ns = NOW_NS
    return rows


def test_the_table_says_what_each_job_does(eelctl, crowd):
    assert eelctl("jobs", "--all").stdout == strip_table("""
ID         NAME            USER       STATE      GPUS     AGE    RAN  PROGRESS  ENERGY  EXIT  REASON
waits      waits-name      ada        pending       1     2 d      -         -       -     -  gpu_count: no node has enough whole GPUs free
starts     starts-name     ada        starting      -  10 min      -         -       -     -  -
runs       runs-name       certified  running       2  10 min  9 min  25% 0.25       -     -  -
stops      stops-name      ada        stopping      1  10 min  5 min    step 7       -     -  -
unstarted  unstarted-name  ada        running       1  10 min      -         -       -     -  -
many       many-name       ada        pending       1  10 min      -         -       -     -  10 elements: 2 placed, 8 pending, 2 at once; array: waits
good       good-name       ada        succeeded     1  10 min  4 min         -       -     0  -
killed     killed-name     ada        failed        1  10 min  4 min         -       -   137  ended by SIGKILL
never      never-name      ada        cancelled     1  10 min      -         -       -     -  -
""")


@pytest.mark.parametrize("arguments", [("jobs", "--all"), ("queue",), ("queue", "--by", "user")])
def test_a_controller_that_knows_no_summaries_gets_the_same_table(eelctl, crowd, fake, arguments):
    known = eelctl(*arguments).stdout
    assert known
    fake.knows_no_views = True
    assert eelctl(*arguments).stdout == known


@pytest.mark.parametrize("command", ["jobs", "queue"])
def test_only_a_document_asks_for_whole_workloads(eelctl, crowd, fake, command):
    for form, view in (("table", WorkloadView.SUMMARY), ("json", WorkloadView.UNSPECIFIED)):
        fake.views.clear()
        eelctl(command, "-o", form)
        assert set(fake.views) == {view}


def test_a_document_has_whole_jobs_in_the_order_of_the_table(eelctl, crowd):
    found = json.loads(eelctl("jobs", "--all", "--sort", "state", "--filter", "user=ada", "-o", "json").stdout)
    lines = eelctl("jobs", "--all", "--sort", "state", "--filter", "user=ada", "--no-headers").stdout.splitlines()
    assert [row["workload_id"] for row in found] == [line.split()[0] for line in lines]
    assert {row["workload_id"]: row["spec"]["process"]["environment"] for row in found}["waits"] == {"SECRET": "x"}
    assert yaml.safe_load(eelctl("jobs", "--all", "-o", "yaml", "--limit", "2").stdout) == json.loads(
        eelctl("jobs", "--all", "-o", "json", "--limit", "2").stdout
    )
