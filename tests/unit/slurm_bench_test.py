"""The benchmarks of Slurm: moments from slurmctld's log, as 22.05 writes it, and looks at a Slurm in memory."""

import asyncio
from datetime import datetime

from bench.slurm import SlurmRound, parse_moments
from bench.slurm_energy import (
    JobRun,
    NodeActivity,
    count_energy,
    parse_nodes_of_jobs,
    sleep_by_decisions,
    sleep_by_timer,
)
from bench.slurm_looks import measure_looks

from eelgrid_controller.objectives.power.power_save import SleepCosts

LOG = """
[2026-11-27T11:26:15.000] _slurm_rpc_submit_batch_job: JobId=1 InitPrio=0 usec=201
[2026-11-27T11:26:15.250] sched: _release_job_rec: release hold on JobId=1 by uid 0
[2026-11-27T11:26:15.500] sched/backfill: _start_job: Started JobId=1 in main on n2
[2026-11-27T11:26:16.000] _job_complete: JobId=1 WEXITSTATUS 0
[2026-11-27T11:26:16.125] _job_complete: JobId=1 done
[2026-11-27T11:26:17.000] _slurm_rpc_submit_batch_job: JobId=2 InitPrio=0 usec=201
[2026-11-27T11:26:17.000] _slurm_rpc_submit_batch_job: JobId=3 InitPrio=0 usec=201
[2026-11-27T11:26:18.000] sched: Allocate JobId=2 NodeList=n2 #CPUs=1 Partition=main
[2026-11-27T11:26:18.500] _job_complete: JobId=2 done
[2026-11-27T11:26:19.000] _job_complete: JobId=3 done
torn line
"""


def test_moments_of_jobs_are_read_from_the_log_and_become_spans_and_a_rate():
    moments = parse_moments(LOG)
    begun = datetime.fromisoformat("2026-11-27T11:26:15").timestamp()
    assert {name: found[1] - begun for name, found in moments.items()} == {
        "submitted": 0.0, "released": 0.25, "allocated": 0.5, "completed": 1.125,
    }  # fmt: skip
    found = SlurmRound(is_steered=True, moments=moments, singles=frozenset({1}), controller_cpu_s=0.0)
    assert found.list_spans("submitted", "released") == [0.25]
    assert found.list_spans("submitted", "allocated") == [0.5]
    assert found.rate_hz == 1.0


def test_the_cost_of_looks_is_measured_with_jobs_that_have_ended_and_all_gpus_in_use():
    costs = asyncio.run(measure_looks(ended=30, waiting=5, looks=4))
    assert sum(map(len, costs.spans_ms.values())) == 4
    assert min(span for spans in costs.spans_ms.values() for span in spans) > 0.0


COSTS = SleepCosts(idle_w=800.0, sleep_w=20.0, transition_j=78_000.0, wake_s=60.0)  # worth it from 100 s on
RUNS = [
    JobRun("n0", 2, 0.0, 0.0, 500.0),
    JobRun("n0", 1, 450.0, 450.0, 600.0),
    JobRun("n1", 4, 900.0, 1000.0, 1100.0),
]


def test_idle_spans_of_a_node_are_what_no_job_covers():
    activity = NodeActivity(RUNS, ("n0", "n1", "n2"), 2000.0)
    idle = {name: activity.list_idle(name) for name in activity.names}
    assert idle == {"n0": [(600.0, 2000.0)], "n1": [(0.0, 1000.0), (1100.0, 2000.0)], "n2": [(0.0, 2000.0)]}


def test_joules_are_those_of_nodes_transitions_and_held_gpus():
    activity = NodeActivity(RUNS, ("n0", "n1"), 2000.0)
    held_j = 100.0 * (2 * 500.0 + 150.0 + 4 * 100.0)
    never = count_energy(activity, [], COSTS, 100.0, placement="Slurm", sleep="never")
    assert (never.joules, never.sleeps, never.woken_jobs) == (2 * 2000.0 * 800.0 + held_j, 0, 0)
    sleeps = sleep_by_timer(activity, 300.0)
    assert sleeps == [("n0", 900.0, 2000.0), ("n1", 300.0, 1000.0), ("n1", 1400.0, 2000.0)]
    slept_s = 1100.0 + 700.0 + 600.0
    timer = count_energy(activity, sleeps, COSTS, 100.0, placement="Slurm", sleep="timer")
    assert timer.joules == never.joules - slept_s * 780.0 + 3 * 78_000.0
    # The second job of n1 is woken for; the end of the hour is no job.
    assert (timer.sleeps, timer.woken_jobs) == (3, 1)


def test_our_power_saving_lets_idle_nodes_sleep_and_never_one_in_use():
    activity = NodeActivity(RUNS, ("n0", "n1", "n2"), 2000.0)
    sleeps = sleep_by_decisions(activity, COSTS)
    assert {name for name, _, _ in sleeps} == {"n0", "n1", "n2"}
    for name, since_s, until_s in sleeps:
        assert any(begin_s <= since_s < until_s <= end_s for begin_s, end_s in activity.list_idle(name)), (
            name,
            since_s,
        )
    ours = count_energy(activity, sleeps, COSTS, 100.0, placement="Slurm", sleep="ours")
    never = count_energy(activity, [], COSTS, 100.0, placement="Slurm", sleep="never")
    assert ours.joules < never.joules


def test_nodes_of_jobs_are_read_from_the_log():
    assert parse_nodes_of_jobs(LOG) == {1: "n2", 2: "n2"}
