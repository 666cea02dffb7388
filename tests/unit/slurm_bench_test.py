"""The benchmarks of Slurm: moments from slurmctld's log, as 22.05 writes it, and looks at a Slurm in memory."""

import asyncio
from datetime import datetime

from bench.slurm import SlurmRound, parse_moments
from bench.slurm_looks import measure_looks

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
