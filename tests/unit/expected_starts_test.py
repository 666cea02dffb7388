"""Expected starts in answers to dry runs: by the ends of what runs, and by what waits before."""

from dataclasses import replace

import pytest
from tests.builders.cluster import build_core, build_node, build_request

from eelgrid_protos.messages import JobArrayRequest

S = 10**9
NOW_NS = 1000 * S


def build_busy(*, gpus=2, run_s=600.0, queued=(), nodes=1):
    """A cluster whose GPUs are held for `run_s`, and work of these run times that waits, one GPU each."""
    core = build_core(*(build_node(f"n{number}", gpus=gpus) for number in range(nodes)))
    for number in range(gpus * nodes):
        core.submit(build_request(f"w-run{number}", expected_runtime_s=run_s), now_ns=NOW_NS)
    for number, wait_s in enumerate(queued):
        core.submit(build_request(f"w-wait{number}", expected_runtime_s=wait_s), now_ns=NOW_NS)
    return core


def preview(core, **spec):
    request = build_request(dry_run=True, **spec)
    return core.submit(request, now_ns=NOW_NS).result


def test_what_would_start_now_is_expected_now_and_nothing_is_kept():
    core = build_core(build_node(gpus=2))
    assert preview(core).expected_start_ns == NOW_NS
    assert not core.state.workloads
    assert core.submit(build_request("w-x"), now_ns=NOW_NS).result.expected_start_ns == 0


def test_what_waits_alone_is_expected_at_the_end_of_what_runs():
    found = preview(build_busy(run_s=600.0))
    assert found.expected_start_ns == NOW_NS + 600 * S
    assert found.promise is None


def test_each_workload_before_it_delays_the_expected_start():
    starts = [preview(build_busy(queued=(400.0,) * count)).expected_start_ns for count in range(5)]
    assert starts == sorted(starts)
    # The first that waits has a reserved start; 3 others keep 2 GPUs for 600 s.
    assert starts[4] - starts[1] == pytest.approx(600 * S, rel=0.01)


def test_work_of_lower_priority_delays_nothing():
    core = build_busy(queued=(400.0,) * 4)
    assert preview(core, priority=5, expected_runtime_s=60.0).expected_start_ns == NOW_NS + 600 * S


def test_without_an_end_that_is_known_nobody_knows_the_start():
    core = build_core(build_node(gpus=1))
    core.submit(build_request("w-run"), now_ns=NOW_NS)
    assert preview(core).expected_start_ns == 0
    held = replace(build_request(dry_run=True), hold=True)
    assert build_busy().submit(held, now_ns=NOW_NS).result.expected_start_ns == 0


def test_the_first_element_of_an_array_says_when_it_starts():
    array = JobArrayRequest(indexes="0-3")
    request = replace(build_request(dry_run=True), array=array)
    assert build_core(build_node(gpus=1)).submit(request, now_ns=NOW_NS).result.expected_start_ns == NOW_NS
    assert build_busy().submit(request, now_ns=NOW_NS).result.expected_start_ns == NOW_NS + 600 * S
