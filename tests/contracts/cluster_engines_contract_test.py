"""What holds of work whichever engine runs it: the local one, Slurm, Ray or Flux; each as a program of ours and as a real one.

The promises are those of the engine that runs processes (engine_contract_test.py), as far as an operator sees them from the
controller. A real engine is tried where it is found, else its tests are skipped and say so.
"""

from contextlib import suppress

import pytest
from tests.engine_worlds import GPUS, WORLDS, list_engines
from tests.waiting import poll_until

from eelgrid_protos.messages import (
    CancelWorkloadRequest,
    ResourceRequest,
    SubmitWorkloadRequest,
    WorkloadPhase,
    WorkloadSpec,
)

ENGINES = [
    pytest.param(name, marks=pytest.mark.skipif(bool(missing), reason=missing or "it is there"))
    for name, missing in list_engines().items()
]


@pytest.fixture(scope="module", params=ENGINES)
def shared(request, tmp_path_factory):
    """An engine and its controller, for all tests."""
    found = WORLDS[request.param](tmp_path_factory.mktemp(request.param))
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def world(shared):
    """The engine, which holds nothing before and after a test."""
    yield shared
    shared.clear()


def skip_unless_promised(world, what):
    """Skips a test of what an engine does not promise, and says why."""
    if what in world.lacks:
        pytest.skip(f"not promised: {world.lacks[what]}")


def wait_running(world, *jobs):
    poll_until(lambda: all(world.starts(job) for job in jobs), "the jobs have begun", within_s=world.within_s)
    poll_until(lambda: all(map(world.holds_all, jobs)), "they hold their devices", within_s=world.within_s)
    wait_agreement(world)


def wait_agreement(world):
    """Waits until the core knows the same devices as the engine."""
    with suppress(AssertionError):
        poll_until(lambda: world.known_devices() == world.held_by_engine(), within_s=world.within_s)
    assert world.known_devices() == world.held_by_engine()


def submit_record(world, key):
    """Work of nobody's engine on one GPU, which the core alone places."""
    spec = WorkloadSpec(name=key, request=ResourceRequest(gpu_count=1, gpu_milli=1000))
    request = SubmitWorkloadRequest(spec=spec, workload_id=key)
    return world.cluster.operators.submit_workload(request, timeout=10.0).workload.phase


def cancel_record(world, key):
    world.cluster.operators.cancel_workload(CancelWorkloadRequest(workload_id=key), timeout=10.0)


def test_jobs_hold_the_very_devices_that_the_core_says_and_none_is_held_twice(world):
    jobs = [world.start(gpus) for gpus in (2, 1, 1)]
    wait_running(world, *jobs)
    held = world.held_by_engine()
    assert all(len(keys) == 1 for keys in held.values())
    assert sorted(sum(keys == [world.key(job)] for keys in held.values()) for job in jobs) == [1, 1, 2]
    assert [world.phase(job) for job in jobs] == [WorkloadPhase.PLACED] * 3


@pytest.mark.parametrize(("code", "phase"), [(0, WorkloadPhase.SUCCEEDED), (37, WorkloadPhase.FAILED)])
def test_a_job_ends_in_the_core_as_it_ended_in_its_engine(world, code, phase):
    job = world.start_ending(code)
    wait_running(world, job)
    world.end(job, code)
    poll_until(lambda: world.phase(job).is_ended, "the core knows of the end", within_s=world.within_s)
    found = world.workload(job)
    assert (found.phase, found.exit_code) == (phase, code)
    assert found.reason == ("" if not code else "exited with 37")
    assert 0 < found.attempts[0].started_ns <= found.attempts[0].ended_ns


def test_a_job_that_is_cancelled_in_its_engine_is_cancelled_in_the_core_and_holds_nothing(world):
    job = world.start(2)
    wait_running(world, job)
    world.cancel(job)
    poll_until(lambda: world.is_over(job), "the engine has ended it", within_s=world.within_s)
    poll_until(lambda: world.phase(job).is_ended, "the core knows", within_s=world.within_s)
    assert world.phase(job) is WorkloadPhase.CANCELLED
    poll_until(
        lambda: world.known_devices() == world.held_by_engine() == {}, "nothing is held", within_s=world.within_s
    )


def test_a_job_that_an_operator_cancels_ends_in_its_engine(world):
    skip_unless_promised(world, "ends what an operator cancels")
    job = world.start()
    wait_running(world, job)
    cancel_record(world, world.key(job))
    poll_until(lambda: world.is_over(job), "the engine has ended it", within_s=world.within_s)
    poll_until(lambda: world.phase(job) is WorkloadPhase.CANCELLED, "so has the core", within_s=world.within_s)
    assert world.starts(job) == 1


def test_what_is_full_lets_nothing_more_begin_and_the_next_begins_when_something_ends(world):
    nodes = [name for name in world.names if name != "head"]
    full = [world.start(GPUS) for _ in nodes]
    wait_running(world, *full)
    assert len(world.devices()) == GPUS * len(nodes)
    later = world.start(GPUS)
    # What the engine holds is given to nobody else either.
    assert submit_record(world, "beside") is WorkloadPhase.PENDING
    cancel_record(world, "beside")
    assert world.starts(later) == 0
    world.cancel(full[0])
    wait_running(world, later)
    assert all(len(keys) == 1 for keys in world.held_by_engine().values())


@pytest.mark.parametrize("loses_journal", [False, True], ids=["journal", "lost journal"])
def test_jobs_outlive_a_controller_that_is_killed_and_none_begins_twice(world, loses_journal):
    if loses_journal:
        skip_unless_promised(world, "adopts without a journal")
    jobs = [world.start(gpus) for gpus in (1, 2)]
    wait_running(world, *jobs)
    before = world.held_by_engine()
    world.kill_controller(loses_journal=loses_journal)
    assert world.held_by_engine() == before
    world.start_controller()
    wait_agreement(world)
    assert world.held_by_engine() == before
    assert [world.starts(job) for job in jobs] == [1, 1]
    # And it goes on with what comes.
    wait_running(world, *jobs, world.start())
