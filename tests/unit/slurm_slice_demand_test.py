"""Layouts by the jobs that wait: which idle nodes are cut, into what, what is left alone, and who is left out."""

from collections import Counter

import pytest

from eelgrid_controller.engines.slurm.answers import GresCount, SlurmJob, SlurmNode
from eelgrid_controller.engines.slurm.slice_demand import SliceDemand, is_slice, list_wanted_slices
from eelgrid_controller.partition.plan import PartitionReplica, RunningGpu, RunningInstance
from eelgrid_controller.partition.survey import PartitionSurvey, SurveyedGpu
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.messages import GpuLayout

GEOMETRY = load_catalogue().products["h100-sxm5-80gb"].mig
LATE_S = 1000.0
HALVES, SEVENTHS = (("3g", 0), ("3g", 4)), tuple(("1g", start) for start in range(7))


def seat(node, index, layout=(), **fields):
    running = RunningGpu(
        uuid=f"{node}/{index}",
        node=node,
        model="H100",
        mig_enabled=bool(layout),
        instances=tuple(RunningInstance(key, start) for key, start in layout),
    )._replace(**fields.pop("running", {}))
    layout = GpuLayout(gpu_uuid=running.uuid, mig_enabled=running.mig_enabled)
    return SurveyedGpu(node_name=node, index=index, geometry=GEOMETRY, running=running, layout=layout, **fields)


def node(name, **fields):
    base = {"cpus": 16, "memory_bytes": 2**36, "partitions": frozenset({"mig"}), "states": frozenset({"IDLE"})}
    return SlurmNode(name=name, **base | fields)


def job(number, *slices, **fields):
    gpus = tuple(GresCount(kind, count) for kind, count in sorted(Counter(slices).items()))
    base = {"job_id": str(number), "partition": "mig", "gpus": gpus, "submit_s": number, "cpus": 1}
    return SlurmJob(**base | fields)


def plan(seats, nodes, jobs, *, demand=None, now_s=LATE_S):
    """What each node is cut into, by GPU."""
    demand = demand or SliceDemand()
    waiting = demand.select_jobs(jobs, now_s)
    survey = PartitionSurvey(revision=1, seats=tuple(seats), services=())
    stages = demand.plan(survey, waiting, nodes, now_s)
    assert not any(stage.drains for stage in stages)
    return {
        turn.after.uuid: sorted(Counter(one.profile for one in turn.after.instances).items())
        for stage in stages
        for turn in stage.turns
    }


def test_an_idle_node_is_cut_for_a_job_that_waits_and_the_rest_of_the_gpu_for_more_of_its_kind():
    seats = [seat("d0", 0), seat("d0", 1)]
    assert plan(seats, [node("d0")], [job(1, "1g.10gb")]) == {"d0/0": [("1g", 7)]}
    # Three halves need both GPUs, and the second has room for a fourth.
    halves = [job(number, "3g.40gb") for number in range(3)]
    assert plan(seats, [node("d0")], halves) == {"d0/0": [("3g", 2)], "d0/1": [("3g", 2)]}
    assert plan(seats, [node("d0")], [job(1, "3g.40gb", "1g.10gb", "1g.10gb")]) == {"d0/0": [("1g", 4), ("3g", 1)]}


def test_a_job_whose_slices_stand_keeps_the_node_as_it_is_and_another_is_cut_for_the_next():
    seats = [seat("d0", 0, HALVES), seat("d1", 0, HALVES)]
    nodes = [node("d0"), node("d1")]
    assert plan(seats, nodes, [job(1, "3g.40gb")]) == {}
    assert plan(seats, nodes, [job(1, "3g.40gb"), job(2, "1g.10gb")]) == {"d1/0": [("1g", 7)]}
    # Who comes first has the first choice: here nothing is left for the second.
    assert plan(seats[:1], nodes[:1], [job(1, "3g.40gb"), job(2, "1g.10gb")]) == {}
    assert plan(seats[:1], nodes[:1], [job(2, "3g.40gb"), job(1, "1g.10gb")]) == {"d0/0": [("1g", 4), ("3g", 1)]}


def test_a_gpu_that_is_cut_as_is_wanted_is_no_change():
    seats = [seat("d0", 0, HALVES), seat("d0", 1, SEVENTHS)]
    found = plan(seats, [node("d0")], [job(1, *["3g.40gb"] * 4)])
    assert found == {"d0/1": [("3g", 2)]}


@pytest.mark.parametrize(
    "changed",
    [
        {"states": frozenset({"IDLE", "DRAIN"})},
        {"states": frozenset({"MIXED"})},
        {"states": frozenset({"IDLE", "PLANNED"})},
        {"states": frozenset({"IDLE", "POWERED_DOWN"})},
        {"partitions": frozenset({"other"})},
        {"cpus": 0},
        {"memory_bytes": 0},
    ],
    ids=["drained", "mixed", "planned", "asleep", "of another partition", "without CPUs", "without memory"],
)
def test_a_node_that_is_not_idle_or_not_for_the_job_is_left_alone(changed):
    waiting = job(1, "1g.10gb", memory_bytes=1)
    assert plan([seat("d0", 0)], [node("d0")], [waiting])
    assert plan([seat("d0", 0)], [node("d0", **changed)], [waiting]) == {}


def test_a_node_with_a_gpu_that_is_somebody_elses_is_left_alone_as_a_whole():
    """A node goes out of service for a change, with all that is on it."""
    waiting, replica = [job(1, "1g.10gb")], PartitionReplica("bert", 0, 1.0, 1.0, None)
    serving = {"running": {"mig_enabled": True, "instances": (RunningInstance("3g", 0, replica),)}}
    for other in (seat("d0", 1, held="w-1 runs on it"), seat("d0", 1, **serving)):
        assert plan([seat("d0", 0), other], [node("d0")], waiting) == {}


@pytest.mark.parametrize(
    "changed",
    [
        {"is_held": True},
        {"is_held": True, "admin_comment": "eelgrid:left no"},
        {"dependency": "afterok:3"},
        {"state": "RUNNING"},
        {"submit_s": int(LATE_S)},
        {"eligible_s": int(LATE_S) + 60},
        {"node_count": 2},
        {"features": "nvlink"},
        {"required_nodes": ("n0",)},
    ],
    ids=str,
)
def test_a_job_that_waits_for_something_else_changes_nothing(changed):
    assert plan([seat("d0", 0)], [node("d0")], [job(1, "1g.10gb", **changed)]) == {}


def test_a_job_that_opted_in_and_is_held_by_us_counts():
    held = job(1, "1g.10gb", is_held=True, admin_comment="eelgrid:held")
    assert plan([seat("d0", 0)], [node("d0")], [held]) == {"d0/0": [("1g", 7)]}


def test_what_is_no_slice_of_the_part_or_does_not_fit_changes_nothing():
    for slices in (("1g.5gb",), ("7g.80gb", "7g.80gb"), ("a100",), ("1g.10gb", "a100"), ()):
        assert plan([seat("d0", 0)], [node("d0")], [job(1, *slices)]) == {}
    assert list_wanted_slices(job(1, "1g.10gb", "1g.10gb", "3g.40gb")) == {"1g.10gb": 2, "3g.40gb": 1}
    assert [is_slice(kind) for kind in ("1g.10gb.me", "1c.3g.40gb", "h100", "3g", "")] == [True, True] + [False] * 3
    # A slice with the media engines has its own type, and there is one of it.
    assert plan([seat("d0", 0)], [node("d0")], [job(1, "1g.10gb.me")]) == {"d0/0": [("1g+me", 1)]}


def test_a_job_that_does_not_start_although_its_slices_stand_is_left_out_and_comes_again():
    seats, nodes, demand = [seat("d0", 0, HALVES)], [node("d0")], SliceDemand()
    stuck, other = job(1, "3g.40gb"), job(2, "1g.10gb")
    assert plan(seats, nodes, [stuck, other], demand=demand) == {}
    assert plan(seats, nodes, [stuck, other], demand=demand, now_s=LATE_S + 170.0) == {}
    assert plan(seats, nodes, [stuck, other], demand=demand, now_s=LATE_S + 181.0) == {"d0/0": [("1g", 7)]}
    # After a while it has its turn again; what was remembered of a job that is gone is forgotten.
    assert plan(seats, nodes, [stuck, other], demand=demand, now_s=LATE_S + 900.0) == {}
    assert plan(seats, nodes, [other], demand=demand, now_s=LATE_S + 901.0) == {"d0/0": [("1g", 7)]}
    assert plan(seats, nodes, [stuck, other], demand=demand, now_s=LATE_S + 902.0) == {}
