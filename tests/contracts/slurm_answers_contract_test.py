"""Slurm's answers as its versions write them: one recorded from 22.05, and the same in the forms of later data parsers.

`slurm_answers/` has real answers of Debian's 22.05.8 (v0.0.38), cut down to the fields that are read. Later versions are
made of them by what the data parsers changed: numbers as objects (v0.0.39), states as lists (v0.0.40), exit codes and
exclusiveness as objects and lists (v0.0.41).
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eelgrid_controller.engines.slurm.answers import (
    GresCount,
    SlurmUnreadable,
    parse_gres,
    parse_gres_indexes,
    parse_jobs,
    parse_nodes,
)

FOLDER = Path(__file__).parent / "slurm_answers"
JOBS = json.loads((FOLDER / "squeue-v0.0.38.json").read_text())
NODES = json.loads((FOLDER / "sinfo-v0.0.38.json").read_text())
NUMBERS = [
    "array_job_id",
    "array_task_id",
    "node_count",
    "cpus",
    "tasks",
    "priority",
    "eligible_time",
    "time_limit",
    "memory_per_node",
    "memory_per_cpu",
    "het_job_id",
    "submit_time",
    "start_time",
]


def wrap(number):
    return {"set": number is not None, "infinite": False, "number": number or 0}


def write_job(job, version):
    """The same job as a later data parser writes it."""
    found = dict(job)
    if version >= 39:
        found.update({name: wrap(found[name]) for name in NUMBERS})
        found["hold"] = job["priority"] == 0
        found["exit_code"] = wrap(job["exit_code"])
        found["tres_per_node"] = job["tres_per_node"].replace("gres:gpu", "gres/gpu")
    if version >= 40:
        found["job_state"] = [job["job_state"]]
    if version >= 41:
        found["exit_code"] = {
            "status": ["SUCCESS"], "return_code": wrap(job["exit_code"]), "signal": {"id": wrap(None), "name": ""},
        }  # fmt: skip
        found["exclusive"] = ["true"] if job["shared"] == "none" else []
        found["shared"] = [] if job["shared"] == "none" else [job["shared"] or ""]
    return found


def read(version):
    return parse_jobs(json.dumps({"jobs": [write_job(job, version) for job in JOBS["jobs"]]}))


@pytest.mark.parametrize("version", [39, 40, 41, 45])
def test_every_version_gives_the_same_jobs(version):
    assert read(version) == read(38)
    assert not read(38).unreadable


@pytest.mark.parametrize(
    ("written", "end"),
    [
        (0, (0, 0)),
        (3 << 8, (3, 0)),
        (11, (0, 11)),
        (wrap(3 << 8), (3, 0)),
        ({"status": "SIGNALED", "return_code": wrap(None), "signal": {"signal_id": 9, "name": "KILL"}}, (0, 9)),
        ({"status": ["ERROR"], "return_code": wrap(3), "signal": {"id": wrap(None), "name": ""}}, (3, 0)),
        ({"status": ["SIGNALED"], "return_code": wrap(None), "signal": {"id": wrap(11), "name": "SEGV"}}, (0, 11)),
    ],
)
def test_exit_codes_and_signals_are_told_apart_in_every_form(written, end):
    (job,) = parse_jobs(json.dumps({"jobs": [{**JOBS["jobs"][0], "exit_code": written}]})).jobs
    assert (job.exit_code, job.exit_signal) == end


def test_what_jobs_ask_for_is_read_by_node():
    jobs = {job.job_id: job for job in read(38).jobs}
    assert jobs["3"].nodes == ("n0", "n1")
    assert jobs["3"].gpu_indexes == {"n0": tuple(range(8)), "n1": tuple(range(8))}
    assert jobs["3"].peculiar == "it wants its nodes for itself alone (--exclusive)"
    # Four GPUs by job on two nodes, one by each of three tasks on one, and two by node.
    assert jobs["4"].gpus == (GresCount("", 2),)
    assert jobs["5"].gpus == (GresCount("", 3),)
    assert jobs["1"].gpus == (GresCount("a100", 2),)
    assert (jobs["5"].dependency, jobs["5"].is_held) == ("afterok:3(unfulfilled)", True)
    assert [key for key in jobs if key.startswith("7")] == ["7_0", "7_1", "7_2", "7_3"]
    assert (jobs["8"].memory_bytes, jobs["8"].time_limit_s) == (2 << 30, 600.0)
    assert (jobs["8"].required_nodes, jobs["8"].peculiar) == (("n1",), "")
    assert jobs["4"].memory_bytes == 100 << 20


@pytest.mark.parametrize("later", [False, True])
def test_nodes_are_read_with_their_gpus_features_and_partitions(later):
    answer = {"nodes": [dict(node) for node in NODES["nodes"]]}
    if later:
        for node in answer["nodes"]:
            node["state"] = [node["state"].upper(), "DRAIN"]
            node["features"] = node["features"].split(",")
            node["active_features"] = node["active_features"].split(",")
            node["gres"] += "(S:0-1)"
            node["reason"] = "fan"
    first = parse_nodes(json.dumps(answer)).nodes[0]
    assert (first.name, first.cpus, first.memory_bytes) == ("n0", 32, 256_000 << 20)
    assert first.gpus == (GresCount("a100", 8),)
    assert (first.features, first.partitions) == ({"a100", "zone0"}, {"low", "high"})
    assert first.closed == ("Slurm: the node is drained (fan)" if later else "")


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("gpu:8", {"": 8}),
        ("gpu:a100:8(S:0-1),gpu:v100:2", {"a100": 8, "v100": 2}),
        ("gres:gpu:1g.5gb:7", {"1g.5gb": 7}),
        ("gres:gpu", {"": 1}),
        ("gpu:a100", {"a100": 1}),
        ("cpu=4,mem=8G,node=2,billing=4,gres/gpu=8,gres/gpu:a100=8", {"a100": 8}),
        ("craynetwork:1,shard:4", {}),
        ("(null)", {}),
    ],
)
def test_gpus_are_counted_by_type(text, counts):
    assert {one.type: one.count for one in parse_gres(text)} == counts


def test_the_indexes_of_gpus_are_read_where_they_are_said():
    assert parse_gres_indexes("gpu:a100:3(IDX:0-1,7)") == (0, 1, 7)
    assert parse_gres_indexes("gpu:a100:0(IDX:N/A)") == ()
    assert parse_gres_indexes("gpu:a100:2") == ()
    assert parse_gres_indexes("gpu:1g.10gb:2(IDX:0-1),gpu:3g.40gb:1(IDX:4)") == (0, 1, 4)
    assert parse_gres_indexes("nic:1(IDX:7),gpu:2(IDX:2,3),shard:4(IDX:5)") == (2, 3)


def test_one_job_that_cannot_be_read_is_left_out_and_named():
    broken = [{**JOBS["jobs"][0], "job_id": 77, "cpus": "many"}, "x", {"job_state": "PENDING"}]
    found = parse_jobs(json.dumps({"jobs": [*broken, *JOBS["jobs"]]}))
    assert found.jobs == read(38).jobs
    assert [text.partition(":")[0] for text in found.unreadable] == ["77", "x", "None"]
    assert "cpus has 'many' where a number is expected" in found.unreadable[0]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"jobs": 3}', '{"errors": ["slurmctld is away"]}', "[" * 100_000])
def test_an_answer_without_a_list_ends_no_job(text):
    with pytest.raises(SlurmUnreadable):
        parse_jobs(text)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["set", "infinite", "number"]), inner),
    max_leaves=6,
)


@given(name=st.sampled_from(sorted(JOBS["jobs"][0])), value=VALUES)
@settings(deadline=None, max_examples=150)
def test_whatever_a_field_holds_a_job_is_read_or_left_out(name, value):
    found = parse_jobs(json.dumps({"jobs": [{**JOBS["jobs"][2], name: value}, JOBS["jobs"][0]]}))
    assert found.jobs[-1] == replace(read(38).jobs[0])
