"""The table of jobs between full answers: columns of squeue change what changes of a job, and say what they cannot tell."""

from dataclasses import replace

import pytest

from eelgrid_controller.engines.slurm.answers import GresCount, SlurmJob, SlurmJobs, SlurmUnreadable
from eelgrid_controller.engines.slurm.job_table import COLUMNS, JobTable

JOB = SlurmJob(
    job_id="12", name="a|b", user="alice", partition="main", admin_comment="eelgrid:held", is_held=True, cpus=4,
    gpus=(GresCount("a100", 1),), reason="JobHeldUser", submit_s=5, eligible_s=5, features="a100", time_limit_s=60.0,
)  # fmt: skip
HELD = {
    "JobArrayID": "12", "ArrayTaskID": "N/A", "State": "PENDING", "Reason": "JobHeldUser", "PriorityLong": "0",
    "RestartCnt": "0", "StartTime": "N/A", "EndTime": "N/A", "EligibleTime": "5", "NodeList": "", "ReqNodes": "",
    "exit_code": "0:0", "admin_comment": "eelgrid:held",
}  # fmt: skip


def write(**changes):
    """A line as squeue writes it: each column padded and cut to its width, with a mark after it."""
    columns, names = HELD | changes, [one.rstrip("|").split(":") for one in COLUMNS.split(",")]
    assert [name for name, _ in names] == list(HELD)
    return ("".join(columns[name][: int(width)].ljust(int(width)) + "|" for name, width in names) + "\n").encode()


def make(*jobs):
    table = JobTable()
    table.fill(SlurmJobs(jobs=jobs or (JOB,)))
    return table


def test_columns_that_say_the_same_change_nothing():
    table = make()
    for _ in range(2):
        table.update(write())
        assert (table.jobs, table.incomplete) == ((JOB,), 0)


def test_a_job_is_followed_from_its_release_to_its_end():
    table = make()
    released = {
        "PriorityLong": "4294901758",
        "Reason": "Resources",
        "ReqNodes": "n1",
        "admin_comment": "eelgrid:placed:n1",
    }
    table.update(write(**released))
    (job,) = table.jobs
    assert job == replace(
        JOB, is_held=False, reason="Resources", required_nodes=("n1",), admin_comment="eelgrid:placed:n1"
    )
    begun = released | {"State": "RUNNING", "Reason": "None", "StartTime": "100", "EndTime": "160", "NodeList": "n1"}
    table.update(write(**begun))
    (job,) = table.jobs
    assert (job.state, job.nodes, job.start_s, job.reason, job.gpu_indexes) == ("RUNNING", ("n1",), 100, "None", None)
    assert (job.user, job.gpus, job.features, job.time_limit_s) == ("alice", JOB.gpus, "a100", 60.0)
    # Which GPUs it holds, only a full answer tells.
    assert (table.incomplete, table.unindexed) == (0, 1)
    table.fill(SlurmJobs(jobs=(replace(job, gpu_indexes={"n1": (3,)}),)))
    table.update(write(**begun))
    assert (table.jobs[0].gpu_indexes, table.unindexed) == ({"n1": (3,)}, 0)
    table.update(write(**begun | {"State": "COMPLETING", "exit_code": "3:0"}))
    assert table.jobs[0].holds_resources
    table.update(write(**begun | {"State": "FAILED", "exit_code": "3:0", "EndTime": "101"}))
    (job,) = table.jobs
    assert (job.has_ended, job.exit_code, job.exit_signal, job.end_s) == (True, 3, 0, 101)


@pytest.mark.parametrize(("text", "end"), [("0:9", (0, 9)), ("768", (3, 0)), ("9", (0, 9)), ("", (0, 0))])
def test_ends_are_read_in_the_forms_of_all_versions(text, end):
    table = make()
    table.update(write(State="FAILED", exit_code=text))
    assert (table.jobs[0].exit_code, table.jobs[0].exit_signal) == end


def test_a_job_that_was_shrunk_has_fewer_nodes_and_processors():
    running = replace(JOB, state="RUNNING", nodes=("n0", "n1", "n2"), node_count=3, cpus=6, gpu_indexes={"n0": (1,)})
    table = make(running)
    table.update(write(State="RUNNING", NodeList="n[0,2]"))
    (job,) = table.jobs
    assert (job.nodes, job.node_count, job.cpus, job.gpu_indexes) == (("n0", "n2"), 2, 4, None)
    assert table.unindexed == 1


def test_a_requeued_job_is_read_as_22_05_writes_it():
    running = replace(JOB, state="RUNNING", is_held=False, nodes=("n0",), start_s=100, end_s=160, reason="None")
    table = make(running)
    requeued = {"Reason": "job requeued in held state", "RestartCnt": "1", "EndTime": "NONE", "StartTime": "170"}
    table.update(write(State="COMPLETING", NodeList="n0", **requeued))
    assert (table.jobs[0].holds_resources, table.jobs[0].is_held, table.incomplete) == (True, True, 0)
    table.update(write(**requeued))
    (job,) = table.jobs
    assert (job.is_pending, job.is_held, job.restarts, job.nodes, job.end_s) == (True, True, 1, (), 0)


def test_a_flag_of_the_last_full_answer_does_not_outlive_it():
    ending = replace(JOB, state="COMPLETED", flags=frozenset({"COMPLETING"}), nodes=("n1",), start_s=1)
    table = make(ending)
    table.update(write(State="COMPLETED", NodeList="n1", StartTime="1", EndTime="2"))
    assert table.jobs[0].has_ended


def test_a_new_job_waits_for_a_full_answer_and_so_does_the_end_of_one_that_is_not_named():
    table = make(JOB, replace(JOB, job_id="13"))
    table.update(write() + write(JobArrayID="14"))
    assert ([job.job_id for job in table.jobs], table.incomplete) == (["12", "13"], 2)
    table.fill(SlurmJobs(jobs=(JOB,)))
    assert (table.jobs, table.incomplete) == ((JOB,), 0)


def test_jobs_that_ended_before_the_time_asked_for_are_passed_over_until_they_are_asked_for_by_name():
    ended = replace(JOB, state="COMPLETED", start_s=10, end_s=20)
    table = make(JOB, *(replace(ended, job_id=str(number), end_s=number) for number in (21, 22, 23)))
    assert [job.job_id for job in table.select_jobs(ended_since_s=22)] == ["12", "22", "23"]
    assert [job.job_id for job in table.select_jobs(ended_since_s=23)] == ["12", "23"]
    assert [job.job_id for job in table.list_jobs(["21", "99"])] == ["21"]
    begun = {"State": "RUNNING", "NodeList": "n1", "StartTime": "30", "EndTime": "90"}
    table.update(write(**begun))
    assert [job.state for job in table.select_jobs(ended_since_s=23)] == ["RUNNING", "COMPLETED"]
    table.update(write(**begun | {"State": "COMPLETED", "EndTime": "40"}))
    assert [job.end_s for job in table.select_jobs(ended_since_s=24)] == [40]
    # Slurm may start it again.
    table.update(write(RestartCnt="1"))
    assert [(job.state, job.restarts) for job in table.select_jobs(ended_since_s=41)] == [("PENDING", 1)]


def test_what_did_not_change_stays_the_same_object_also_in_a_full_answer():
    table = make(JOB, replace(JOB, job_id="13"))
    table.update(write() + write(JobArrayID="13", Reason="Dependency"))
    first, second = table.jobs
    table.update(write() + write(JobArrayID="13", Reason="Dependency"))
    table.fill(SlurmJobs(jobs=(replace(first), replace(second, reason="JobHeldUser"))))
    assert table.jobs[0] is first
    assert table.jobs[1].reason == "JobHeldUser"
    # The columns are those of before, and say what the full answer does not.
    table.update(write() + write(JobArrayID="13", Reason="Dependency"))
    assert (table.jobs[0] is first, table.jobs[1], table.incomplete) == (True, second, 0)


def test_jobs_are_found_by_what_a_dependency_names():
    table = make(JOB, *(replace(JOB, job_id=f"7_{task}", array_id="7") for task in (1, 2)))
    names = {name: [job.job_id for job in table.find_jobs(name)] for name in ("12", "7", "7_*", "7_2", "8", "12_*")}
    assert names == {"12": ["12"], "7": ["7_1", "7_2"], "7_*": ["7_1", "7_2"], "7_2": ["7_2"], "8": [], "12_*": []}


@pytest.mark.parametrize("first", ["12", "12_3"])
def test_tasks_of_arrays_are_known_by_their_number_in_it(first):
    table = make(replace(JOB, job_id="12_3"), replace(JOB, job_id="12_4"))
    table.update(write(JobArrayID=first, ArrayTaskID="3", Reason="Dependency") + write(ArrayTaskID="4"))
    assert [(job.job_id, job.reason) for job in table.jobs] == [("12_3", "Dependency"), ("12_4", "JobHeldUser")]


def test_many_nodes_are_expanded_and_a_comment_may_hold_a_mark():
    table = make()
    table.update(write(State="RUNNING", NodeList="n[1-3]", admin_comment="eelgrid:placed:n1 a|b|"))
    (job,) = table.jobs
    assert (job.nodes, job.node_count, job.admin_comment) == (("n1", "n2", "n3"), 3, "eelgrid:placed:n1 a|b|")


@pytest.mark.parametrize(
    "changes",
    [
        {"NodeList": ",".join(f"node-{number}" for number in range(100))},
        {"PriorityLong": "x"},
        {"State": "RUN NING"},
        {"exit_code": "one"},
        {"StartTime": "2026-11-27T14:00:00"},
        {"ReqNodes": "n[1"},
    ],
)
def test_columns_that_cannot_be_read_leave_the_job_as_it_was_and_a_full_answer_due(changes):
    table = make()
    for _ in range(2):
        table.update(write(**changes))
        assert (table.jobs, table.incomplete) == ((JOB,), 1)


def test_what_has_other_columns_is_refused_as_a_whole():
    table = make()
    with pytest.raises(SlurmUnreadable, match="13 columns are expected"):
        table.update(b"squeue: error: something\n")
    assert table.jobs == (JOB,)
