"""What a job showed is kept over a restart: a journal on disk, a second control loop, and no second search."""

import contextlib
from types import SimpleNamespace

import pytest
from tests.builders.objectives import build_powered_node, build_training_job, run_objectives
from tests.unit.objectives_jobs_test import Training, ready, standing

from eelgrid_controller.objectives import job_observer
from eelgrid_controller.objectives.forecasts import JobQuestion
from eelgrid_controller.objectives.job_history import (
    HISTORY_INTERVAL_S,
    RUN_INTERVAL_S,
    JobHistories,
    ProfileUpdates,
    former_curve,
    limit_history,
)
from eelgrid_controller.objectives.observation import ClusterObservation, ObservedNode
from eelgrid_controller.objectives.power.bandit import (
    HISTORY_LIMITS_MOST,
    PickReason,
    measured_estimates,
    start_search,
    step_search,
)
from eelgrid_controller.objectives.power.control_events import LimitPhase
from eelgrid_controller.objectives.power.estimates import (
    LimitArm,
    LimitHistory,
    MeasurementWindow,
    WindowScatter,
    prior_from_estimates,
)
from eelgrid_controller.objectives.power.power_model import MaxSlowdown
from eelgrid_controller.profiles.points import Configuration, Point
from eelgrid_controller.runtime.sqlite_journal import open_journal
from eelgrid_controller.state.measurements import make_job_profile_name, make_profile_point
from eelgrid_protos.messages import Placement, Policy, Workload, WorkloadPhase

OWN = make_job_profile_name("j")


async def lived(folder):
    """A job that found its limit before the daemon was killed: the limit, what it had done, and when that was."""
    with contextlib.closing(open_journal(folder, new_cluster_id="c")) as journal:
        async with run_objectives(journal) as world:
            await ready(world, build_training_job("j"))
            training = Training(world)
            await training.run(300)
            assert standing(world).phase is LimitPhase.SETTLED
            points = world.loop.core.state.points[OWN]
            assert len(points) >= 4
            assert standing(world).limit_w in {point.configuration.power_limit_w for point in points}
            return standing(world).limit_w, training.work, world.now_s


async def gone_on(folder, work, start_s, *, cycles=60, slower=1.0):
    """The next life: its limits in every cycle, the phase at its end, and the commands it took."""
    with contextlib.closing(open_journal(folder, new_cluster_id="c")) as journal:
        async with run_objectives(journal, start_s=start_s + 100.0) as world:
            training = Training(world)
            training.work = work
            quick = training.speed
            training.speed = lambda: quick() / slower
            seen, phases = set(), []
            for _ in range(cycles):
                await training.run(1)
                seen |= set(training.limits_w())
                if world.control_loop.objectives_status.steering.jobs:
                    phases.append(standing(world).phase)
            return seen, phases, world.control_loop.counts.done["limit"]


async def test_a_restart_goes_on_at_the_limit_that_was_found_and_tries_nothing_again(tmp_path):
    limit_w, work, now_s = await lived(tmp_path)
    seen, phases, commands = await gone_on(tmp_path, work, now_s)
    assert seen == {limit_w}
    assert set(phases) == {LimitPhase.SETTLED}
    assert commands == 0


async def test_without_what_was_kept_it_would_search_again(tmp_path, monkeypatch):
    limit_w, work, now_s = await lived(tmp_path)
    monkeypatch.setattr(job_observer, "limit_history", lambda *_: LimitHistory())
    seen, phases, commands = await gone_on(tmp_path, work, now_s)
    assert len(seen - {limit_w}) >= 2
    assert LimitPhase.SEARCHING in phases
    assert commands >= 2


async def test_a_job_that_has_changed_meanwhile_is_searched_again(tmp_path):
    _, work, now_s = await lived(tmp_path)
    _, phases, commands = await gone_on(tmp_path, work, now_s, cycles=120, slower=1.5)
    assert phases[0] is LimitPhase.SETTLED
    assert LimitPhase.SEARCHING in phases
    assert commands >= 1


async def test_what_was_kept_is_no_lesson_for_others_and_ends_with_the_job():
    async with run_objectives() as world:
        await ready(world, build_training_job("j"))
        await Training(world).run(300)
        assert OWN in world.loop.core.state.points
        await world.loop.submit(build_training_job("k"))
        await world.cycle()
        assert world.control_loop._desk._jobs._relatives[1].get("G2", ()) == ()
        await world.loop.cancel("j")
        assert OWN not in world.loop.core.state.points
        assert world.loop.core.state.points._count == 0


def placed(key="j", **promise):
    promise = {"slowdown_most": 0.1} | promise
    spec = build_training_job(key, gpus=2, **promise).spec
    workload = Workload(workload_id=key, spec=spec, phase=WorkloadPhase.PLACED)
    uuids = tuple(gpu.uuid for gpu in build_powered_node("n1").gpus[:2])
    return SimpleNamespace(
        **{name: getattr(workload, name) for name in ("workload_id", "spec", "phase")},
        placements=(Placement(replica=0, node_name="n1", gpu_uuids=uuids),),
    )


def at(now_s, workload):
    return ClusterObservation(
        at_s=now_s,
        policy=Policy(),
        workloads={"j": workload},
        nodes={"n1": ObservedNode(build_powered_node("n1"), is_ready=True)},
    )


def arms(*windows):
    return tuple(
        LimitArm(limit_w, count, 100.0 * count, 30.0 * count, 2.0 * limit_w * 30.0 * count)
        for limit_w, count in zip((400.0, 300.0, 200.0), windows, strict=False)
    )


def test_points_come_when_there_is_news_and_not_often():
    workload, kept = placed(), JobHistories()

    def told(now_s, *windows):
        return kept.collect_points({"j": LimitHistory(arms(*windows))}, {"j": workload}, at(now_s, workload))

    assert [point.power_limit_w for point in told(0.0, 3, 3)] == [400.0, 300.0]
    assert told(10.0, 3, 3, 1) == (), "too soon"
    assert len(told(HISTORY_INTERVAL_S, 3, 3, 1)) == 3, "another limit is known"
    assert told(2.0 * HISTORY_INTERVAL_S, 5, 6, 2) == (), "little more than before"
    assert len(told(3.0 * HISTORY_INTERVAL_S, 10, 10, 10)) == 3
    assert len(told(4.0 * HISTORY_INTERVAL_S, 3, 3, 1)) == 3, "the job has changed: its sums began anew"
    assert kept.collect_points({}, {}, at(0.0, workload)) == ()
    assert len(told(4.0 * HISTORY_INTERVAL_S + 1.0, 3)) == 1, "what ended is forgotten"


def test_what_is_read_back_is_what_was_told_and_nothing_else():
    workload = placed()
    noise = WindowScatter.prior(0.01, 0.02, 30.0)
    (point, *_) = JobHistories().collect_points(
        {"j": LimitHistory(arms(6, 3), noise)}, {"j": workload}, at(0.0, workload)
    )

    def kept(gpu_model="G2", gpus=2, source=point.source):
        running = Configuration(gpu_model, gpus=gpus, power_limit_w=point.power_limit_w)
        return Point(OWN, running, point.throughput_hz, power_w=point.power_w, source=source)

    found = limit_history(workload, "G2", [kept()], 30.0)
    assert found.arms == arms(6)
    assert (found.noise.time_share, found.noise.energy_share) == pytest.approx((0.01, 0.02))
    assert found.noise.windows == 6.0
    assert limit_history(workload, "A100", [kept()], 30.0) == LimitHistory()
    strange = (kept(gpus=4), kept(source="by hand"), kept(source="own, 6 windows, scatter 1.1.1 % and 2 %"))
    assert limit_history(workload, "G2", strange[:2], 30.0) == LimitHistory()
    assert limit_history(workload, "G2", strange, 30.0) == LimitHistory(arms(6), None)


def estimates(*windows):
    """What a search knows after so many windows of each limit, half as fast at 200 W as at 400."""
    state, _ = start_search((400.0, 300.0, 200.0), MaxSlowdown(0.1), gpus=2)
    for limit_w, count in zip((400.0, 300.0, 200.0), windows, strict=True):
        for _ in range(count):
            state, _ = step_search(state, MeasurementWindow(limit_w, 100.0 * limit_w / 400.0, 30.0, 60.0 * limit_w))
    return measured_estimates(state)


def test_what_a_run_measured_is_what_the_next_one_is_told():
    workload, updates = placed("j", profile="p"), ProfileUpdates()
    found = estimates(9, 4, 2)

    def told(now_s, found, jobs=True):
        return updates.collect_points({"j": workload} if jobs else {}, at(now_s, workload), lambda _: found)

    def curve(points):
        return former_curve(map(make_profile_point, points), JobQuestion("p", "G2", 2, (400.0, 300.0, 200.0)))

    points = told(0.0, found)
    assert [(one.profile, one.gpus, one.power_limit_w) for one in points] == [
        ("p", 2, limit_w) for limit_w in (400.0, 300.0, 200.0)
    ]
    assert points[1].throughput_hz == pytest.approx(2.5)
    assert points[1].power_w == pytest.approx(600.0)
    expected = prior_from_estimates(found, 0, 0.0)
    for ours, theirs in ((curve(points).time, expected.time), (curve(points).energy, expected.energy)):
        assert [one.mean for one in ours] == pytest.approx([one.mean for one in theirs])
        assert [one.scatter for one in ours][1:] == pytest.approx([one.scatter for one in theirs][1:], abs=1e-6)
    assert told(RUN_INTERVAL_S, estimates(10, 5, 4)) == (), "little more than before"
    assert told(2.0 * RUN_INTERVAL_S - 1.0, estimates(50, 50, 50)) == (), "looked at a moment ago"
    assert len(told(2.0 * RUN_INTERVAL_S, estimates(50, 50, 50))) == 3
    updates.end_runs(["j", "other"], 200.0, lambda name: estimates(60, 50, 50) if name == "j" else ())
    assert len(told(200.0, (), jobs=False)) == 3, "the last windows of a run count as well"
    assert told(201.0, (), jobs=False) == ()
    told(300.0, found)
    updates.end_runs(["j"], 301.0, lambda _: found)
    assert told(301.0, (), jobs=False) == (), "nothing is new at its end"


def test_of_two_runs_of_a_profile_one_is_recorded_at_a_time():
    jobs, updates = {name: placed(name, profile="p") for name in ("j", "k")}, ProfileUpdates()
    found = {"j": estimates(9, 4, 2), "k": estimates(9, 4, 0)}
    known = {name: tuple(one for one in of if one is not None) for name, of in found.items()}
    assert len(updates.collect_points(jobs, at(0.0, jobs["j"]), known.__getitem__)) == 3
    assert len(updates.collect_points(jobs, at(5.0, jobs["j"]), known.__getitem__)) == 2
    without = {"j": placed("j")}
    assert ProfileUpdates().collect_points(without, at(0.0, without["j"]), known.__getitem__) == ()


def test_a_limit_of_few_windows_is_handed_on_with_more_doubt():
    one, many = estimates(9, 9, 1)[2], estimates(9, 9, 40)[2]
    assert one.ratio_error > 0.03
    assert many.ratio_error < 0.01
    assert estimates(2, 9, 9) == (None, None, None), "the largest limit is not known well enough"


async def test_the_second_run_of_a_profile_begins_with_what_the_first_one_measured():
    async def run(world, key):
        await world.loop.submit(build_training_job(key, slowdown_most=0.1, profile="p"))
        training = Training(world, key)
        tried = set()
        for _ in range(300):
            await training.run(1)
            tried |= set(training.limits_w())
        (job,) = world.control_loop.objectives_status.steering.jobs
        assert job.phase is LimitPhase.SETTLED
        basis = world.control_loop._desk._foreseen.job_bases().get(key, "")
        await world.loop.cancel(key)
        await world.cycle()
        return tried, job.limit_w, basis

    async with run_objectives() as world:
        await ready(world)
        first, limit_w, basis = await run(world, "j")
        assert basis == ""
        assert all(point.source.startswith("telemetry of 20") for point in world.loop.core.state.points["p"])
        second, again_w, basis = await run(world, "k")
        assert basis.startswith("measured on former runs: ")
        assert again_w == limit_w
        assert len(second) < len(first)


def test_a_search_that_begins_with_what_was_shown_believes_a_few_windows_of_each_limit():
    state, decision = start_search((400.0, 300.0, 200.0), MaxSlowdown(0.1), gpus=2, shown=LimitHistory(arms(400, 3)))
    assert [arm.windows for arm in state.arms] == [HISTORY_LIMITS_MOST, 3, 0]
    assert state.arms[0].power_w == arms(400)[0].power_w
    assert state.windows == HISTORY_LIMITS_MOST + 3
    assert decision.why is not PickReason.REFERENCE
    cold, first = start_search(
        (400.0, 300.0), MaxSlowdown(0.1), shown=LimitHistory((LimitArm(350.0, 5, 1.0, 1.0, 1.0), LimitArm(300.0)))
    )
    assert (cold.windows, first.limit_w) == (0, 400.0)
