"""How often a job should save: Daly's interval, and what its inputs are learned from."""

import json
from dataclasses import replace

import pytest
from tests.builders.cluster import build_core, build_node, build_request

from eelgrid_controller.core.core import Core
from eelgrid_controller.formatting import describe_checkpoint_advice
from eelgrid_controller.queueing.checkpoint_interval import compute_checkpoint_interval
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import event_from_plain, event_to_plain
from eelgrid_controller.state.interruptions import PRIOR_GPU_S, PRIOR_JOB_S
from eelgrid_protos import catalogue
from eelgrid_protos.messages import (
    AttemptState,
    AttemptStatus,
    CheckpointAdvice,
    CheckpointCostSource,
    JobSchedule,
    Mobility,
    ProcessSpec,
    Queue,
    QueuePreemption,
    QueueQuota,
)
from eelgrid_protos.messages import PreemptionWithin as Within

S = 10**9
H = 3600 * S
PROCESS = ProcessSpec(argv=("python", "train.py"), working_directory="/home/ann")


@pytest.mark.parametrize(
    ("cost_s", "between_s", "interval_s"),
    [(10.0, 3600.0, 260.0), (60.0, 86_400.0, 3180.0), (100.0, 50.0, 50.0), (500.0, 50.0, 50.0)],
)
def test_the_interval_between_checkpoints_is_dalys(cost_s, between_s, interval_s):
    assert compute_checkpoint_interval(cost_s, between_s) == pytest.approx(interval_s, rel=0.02)


def test_an_interval_needs_a_cost_and_a_mean_time_between_interruptions():
    for inputs in ((0.0, 1.0), (1.0, 0.0)):
        with pytest.raises(ValueError, match="positive"):
            compute_checkpoint_interval(*inputs)


def begin(*, gpus=4, queues=()):
    core = build_core(build_node("a", gpus=gpus, runs_processes=True, agent_version="1"))
    if queues:
        core.update_policy(replace(core.state.policy, queues=queues), now_ns=2)
    return core


def submit(core, key, now_ns, *, gpus=1, **spec):
    request = build_request(key, gpus=gpus, process=PROCESS, mobility=Mobility.FIXED, **spec)
    return core.submit(request, now_ns=now_ns).result


def report(core, key, now_ns, state=AttemptState.RUNNING, **known):
    attempt = core.workload(key).attempt
    status = AttemptStatus(workload_id=key, replica=0, attempt=attempt, state=state, started_ns=1, **known)
    return core.record_attempts("a", (status,), now_ns=now_ns)


def end(core, key, now_ns, **known):
    return report(core, key, now_ns, AttemptState.ENDED, ended_ns=now_ns, **{"exit_code": 0, **known})


def advise(core, key, now_ns):
    return core.checkpoints.advise(core.workload(key), now_ns)


def test_a_job_of_which_nothing_is_known_has_the_presumed_time_between_interruptions_and_no_interval():
    core = begin()
    submit(core, "j", 10 * S, gpus=2)
    advice = advise(core, "j", 10 * S)
    assert advice.mean_between_s == pytest.approx(1.0 / (1.0 / PRIOR_JOB_S + 2.0 / PRIOR_GPU_S))
    assert (advice.interval_s, advice.cost_source) == (0.0, CheckpointCostSource.UNSPECIFIED)
    assert "what a save takes is not known" in describe_checkpoint_advice(advice)


def test_work_without_processes_and_work_that_waits_get_no_advice():
    core = begin(gpus=1)
    core.submit(build_request("other", gpus=1), now_ns=3)
    submit(core, "waits", 4)
    assert advise(core, "other", 5) is None
    assert advise(core, "waits", 5) is None
    assert not core.state.interruptions.dump()


def test_a_running_job_is_advised_by_the_cost_that_it_reports_and_the_next_by_that_of_its_runs():
    core = begin()
    submit(core, "j", 10 * S, name="train")
    report(core, "j", 20 * S, checkpointed_ns=19 * S, checkpoint_s=30.0)
    advice = advise(core, "j", 20 * S)
    assert (advice.cost_s, advice.cost_source) == (30.0, CheckpointCostSource.THIS_RUN)
    assert advice.interval_s == pytest.approx(compute_checkpoint_interval(30.0, advice.mean_between_s))
    told = core.node_plan("a").assignments[0]
    assert (told.checkpoint_interval_s, told.interrupted_every_s > 80_000) == (0.0, True)
    end(core, "j", 30 * S, checkpointed_ns=29 * S, checkpoint_s=30.0)
    submit(core, "j2", 40 * S, name="train")
    advice = advise(core, "j2", 40 * S)
    assert (advice.cost_s, advice.cost_source) == (30.0, CheckpointCostSource.EARLIER_RUNS)
    told = core.node_plan("a").assignments[0]
    assert told.checkpoint_interval_s == pytest.approx(advice.interval_s)
    # What it was told at its start stays, so that the plan of an epoch never changes.
    assert core.node_plan("a") == core.node_plan("a")
    submit(core, "other", 41 * S, name="serve")
    assert advise(core, "other", 42 * S).cost_s == 0.0


def test_preemptions_of_a_queue_shorten_the_interval_of_its_jobs_only():
    within = QueuePreemption(within=Within.LOWER_PRIORITY)
    quotas = (QueueQuota(resource="gpu", nominal=2000),)
    queues = tuple(Queue(name=name, quotas=quotas, preemption=within) for name in ("busy", "calm"))
    core = begin(queues=queues)
    submit(core, "victim", 10 * S, gpus=2, queue="busy")
    submit(core, "calm", 10 * S, gpus=2, queue="calm")
    for n in range(6):
        start_ns = (1 + n) * H
        report(core, "victim", start_ns)
        submit(core, f"urgent{n}", start_ns + H // 2, gpus=2, queue="busy", priority=9)
        end(core, "victim", start_ns + H // 2 + S, exit_code=None, signal=15)
        report(core, f"urgent{n}", start_ns + H // 2 + 2 * S)
        end(core, f"urgent{n}", start_ns + H // 2 + 3 * S)
    busy, calm = advise(core, "victim", 7 * H), advise(core, "calm", 7 * H)
    assert busy.queue_interruptions == pytest.approx(6.0, rel=0.01)
    assert busy.queue_job_s == pytest.approx(7 * 3600, rel=0.01)
    # Six in 7 h, and one presumed in 24 h.
    assert busy.mean_between_s == pytest.approx(31 * 3600 / 7, rel=0.02)
    assert calm.queue_interruptions == 0.0
    assert calm.mean_between_s == pytest.approx(31 * 3600, rel=0.02)
    assert core.workload("victim").preemptions == 6


def test_a_failure_that_is_retried_and_a_loss_count_once_and_a_cancel_does_not():
    core = begin()
    submit(core, "fails", 10 * S, schedule=JobSchedule(retries_most=3))
    report(core, "fails", 11 * S)
    end(core, "fails", 20 * S, exit_code=1)
    submit(core, "lost", 30 * S, schedule=JobSchedule(retries_most=3))
    report(core, "lost", 31 * S)
    report(core, "lost", 40 * S, AttemptState.LOST, ended_ns=40 * S, reason="the machine restarted")
    submit(core, "gone", 50 * S)
    core.cancel("gone", now_ns=51 * S)
    end(core, "gone", 52 * S, exit_code=None, signal=15)
    submit(core, "j", 60 * S)
    advice = advise(core, "j", 60 * S)
    assert advice.queue_interruptions == pytest.approx(1.0, rel=1e-4)
    assert advice.pool_losses == pytest.approx(1.0, rel=1e-4)


def test_a_lost_gpu_counts_for_its_pool_and_the_failure_that_follows_is_the_same_interruption():
    core = begin(gpus=2)
    submit(core, "j", 10 * S, schedule=JobSchedule(retries_most=3))
    report(core, "j", 11 * S)
    uuid = core.workload("j").placements[0].gpu_uuids[0]
    core.mark_gpu_lost("a", uuid, now_ns=20 * S)
    end(core, "j", 21 * S, exit_code=1)
    submit(core, "k", 60 * S)
    advice = advise(core, "k", 60 * S)
    assert (advice.queue_interruptions, round(advice.pool_losses, 3)) == (0.0, 1.0)


def test_what_was_learned_is_replayed_and_outlives_a_checkpoint_of_the_state():
    core = begin()
    events, before = [], ClusterState.load(json.loads(json.dumps(core.state.dump())))
    submit_events = core.submit(
        build_request("j", process=PROCESS, mobility=Mobility.FIXED, schedule=JobSchedule(retries_most=1)), now_ns=5 * S
    )
    events += submit_events.events
    events += report(core, "j", 6 * S).events
    events += end(core, "j", 7 * S, exit_code=1, checkpointed_ns=6 * S, checkpoint_s=2.5).events
    events += core.retry_waiting(now_ns=60 * S).events
    assert core.workload("j").attempt == 2
    for event in events:
        kind, body = event_to_plain(event)
        before.apply(event_from_plain(kind, json.loads(json.dumps(body))))
    assert before.digest() == core.state.digest()
    loaded = ClusterState.load(json.loads(json.dumps(core.state.dump())))
    assert loaded.digest() == core.state.digest()
    again = Core(loaded, catalogue.load_catalogue())
    assert advise(again, "j", H) == advise(core, "j", H)
    assert advise(again, "j", H).cost_s == 2.5


def test_an_attempt_without_the_cost_of_a_checkpoint_is_written_as_before():
    core = begin()
    submit(core, "j", 5 * S)
    (started,) = report(core, "j", 6 * S).events
    assert not {"checkpoint_s", "checkpointed_ns"} & set(event_to_plain(started)[1]["status"])


def test_advice_is_a_sentence_with_both_inputs_and_their_sources():
    advice = CheckpointAdvice(
        interval_s=1300.0,
        cost_s=40.0,
        cost_source=CheckpointCostSource.THIS_RUN,
        mean_between_s=21_600.0,
        queue="vision",
        queue_interruptions=12.0,
        queue_job_s=3 * 86_400.0,
        pool="h100",
        pool_losses=0.5,
        pool_gpu_s=40 * 86_400.0,
    )
    assert describe_checkpoint_advice(advice) == (
        "checkpoint every 22 min: a save takes 40 s (reported by it), and an interruption is expected every 6 h "
        "(12 in 3 d of running of queue vision, 0.5 GPU losses in 40 d of pool h100)"
    )
