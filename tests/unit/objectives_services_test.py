"""Services through the whole control loop: real loop, core, telemetry and steering; pages and clocks by hand."""

import asyncio
import contextlib

import pytest
from tests.builders.objectives import VLLM, build_powered_node, build_service, build_training_job, run_objectives
from tests.builders.profiles import build_engine_points
from tests.builders.server import MemoryJournal
from tests.waiting import wait_until

from eelgrid_controller.objectives.services.autoscaler import ScalerPhase
from eelgrid_protos.faults import InvalidArgument, NotFound, Unavailable
from eelgrid_protos.messages import ListPromisesResponse, MetricsServer, MetricsSource
from eelgrid_protos.plain_messages import from_plain, to_plain


def standing(world, key="s"):
    return {one.name: one for one in world.control_loop.objectives_status.steering.services}[key]


async def ready(world, *requests):
    """Two nodes that may be changed, and services that begin."""
    await world.join(build_powered_node("n1"), build_powered_node("n2"))
    await world.enforce("p")
    await world.loop.record_measurements(build_engine_points())
    for request in requests:
        await world.loop.submit(request)
    await world.cycle()


async def rounds(world, count, rate_hz, key="s", **changes):
    for _ in range(count):
        world.serve(key, rate_hz, **changes)
        await world.cycle(15.0)


async def test_a_service_grows_under_load_and_shrinks_after_it():
    async with run_objectives() as world:
        await ready(world, build_service("s", replicas_most=8))
        assert standing(world).target == 1
        await rounds(world, 3, 5.0)
        assert world.replicas("s") == 1
        await rounds(world, 6, 90.0)
        grown = world.replicas("s")
        assert grown >= 3
        assert world.control_loop.objectives_status.services["s"].arrived_hz == pytest.approx(90.0, rel=0.05)
        await rounds(world, 4, 90.0)
        assert world.replicas("s") == grown
        assert standing(world).phase is ScalerPhase.STEADY
        assert standing(world).serving == grown
        await rounds(world, 30, 5.0)
        assert world.replicas("s") == 1
        assert world.control_loop.counts.done["scale"] >= 2


async def test_pools_that_are_observed_get_advice_and_nothing_is_done():
    async with run_objectives() as world:
        await ready(world, build_service("s", replicas_most=8))
        await world.enforce()
        await rounds(world, 6, 90.0)
        assert world.replicas("s") == 1
        assert standing(world).target >= 3
        assert world.control_loop.objectives_status.advice == {"s"}
        await world.enforce("p")
        await rounds(world, 6, 90.0)  # it is said again, and now it may be done
        assert world.replicas("s") >= 3
        assert world.control_loop.objectives_status.advice == set()


async def test_without_points_there_is_a_reason_until_they_come():
    async with run_objectives() as world:
        await world.join(build_powered_node("n1"))
        await world.enforce("p")
        await world.loop.submit(build_service("s"))
        await world.cycle()
        assert "run eelctl profile import" in world.control_loop.objectives_status.unsteered["s"]
        assert world.control_loop.objectives_status.steering.services == ()
        await world.loop.record_measurements(build_engine_points())
        await world.cycle()
        assert world.control_loop.objectives_status.unsteered == {}
        assert standing(world).target == 1


async def test_without_metrics_nothing_is_seen_and_nothing_taken_away():
    async with run_objectives() as world:
        await ready(world, build_service("s", replicas=3, metrics=None))
        for _ in range(30):
            await world.cycle(15.0)
        assert world.replicas("s") == 3
        assert "names no metrics" in world.control_loop.objectives_status.services["s"].reason
        assert world.pages.asked == {}


async def test_pages_that_stay_away_make_it_blind_and_keep_what_there_is():
    async with run_objectives() as world:
        await ready(world, build_service("s", replicas=4, replicas_most=8))
        await rounds(world, 3, 90.0)
        before = world.replicas("s")
        await rounds(world, 20, 0.0, missing=range(100))
        assert standing(world).phase is ScalerPhase.BLIND
        assert world.replicas("s") == before
        assert "answered (replica 0: hung)" in world.control_loop.objectives_status.services["s"].reason


async def test_one_page_that_is_missing_does_not_look_like_less_load():
    async with run_objectives() as world:
        await ready(world, build_service("s", replicas=4, replicas_most=8))
        await rounds(world, 8, 90.0)
        before = world.replicas("s")
        await rounds(world, 20, 90.0, missing=(0,))
        assert world.replicas("s") == before
        assert world.control_loop.objectives_status.services["s"].arrived_hz == pytest.approx(90.0, rel=0.1)


async def test_replicas_on_a_lost_node_are_replaced():
    async with run_objectives() as world:
        await ready(world, build_service("s", replicas=6, replicas_least=6, replicas_most=8))
        await rounds(world, 2, 90.0)
        lost = [one.replica for one in world.workload("s").placements if one.node_name == "n1"]
        assert lost
        await world.join(build_powered_node("n3", gpus=8))
        await world.loop.command(lambda core, now_ns: core.mark_node_lost("n1", now_ns=now_ns))
        await rounds(world, 8, 90.0, missing=lost)
        placements = world.workload("s").placements
        assert len(placements) >= 6
        assert "n1" not in {one.node_name for one in placements}


async def test_where_pages_are_of_nodes_an_engine_says_how_many_replicas_serve():
    async with run_objectives() as world:
        await ready(world, build_service("s", replicas_most=8))
        outside = world.loop.outside
        # The only replica's node, and one that routes requests to it.
        outside.pages["s"] = {0: "http://n1/metrics", 5: "http://head/metrics"}
        outside.serving["s"] = 1
        await world.cycle()
        await rounds(world, 3, 5.0)
        assert standing(world).serving == 1
        assert world.control_loop.objectives_status.services["s"].arrived_hz == pytest.approx(5.0, rel=0.1)
        outside.serving["s"] = 0
        await rounds(world, 1, 5.0)
        assert standing(world).serving == 0
        # Without its word, each page is a replica's.
        del outside.serving["s"]
        await rounds(world, 1, 5.0)
        assert standing(world).serving == 2
        outside.serving["s"] = 1
        outside.forget_workload("s")
        assert outside.serving == {}


async def test_a_restart_goes_on_with_what_there_is():
    journal = MemoryJournal()
    async with run_objectives(journal) as world:
        await ready(world, build_service("s", replicas_most=8))
        await rounds(world, 8, 90.0)
        grown, now_s = world.replicas("s"), world.now_s
        assert grown >= 3
    async with run_objectives(journal, start_s=now_s + 100.0) as again:
        assert again.replicas("s") == grown
        await again.cycle()
        assert standing(again).target == grown
        await rounds(again, 3, 90.0)
        assert again.replicas("s") == grown
        await rounds(again, 30, 5.0)
        assert again.replicas("s") == 1


async def test_what_ends_is_forgotten_and_what_is_cancelled_before_its_place_was_never_there():
    async with run_objectives() as world:
        await ready(world, build_service("s"), build_service("waits", replicas=8))
        assert {one.name for one in world.control_loop.objectives_status.steering.services} == {"s"}
        await world.loop.cancel("s")
        await world.loop.cancel("waits")
        await world.cycle()
        assert world.control_loop.objectives_status.steering.services == ()
        assert world.pages.asked == {}
        assert world.control_loop._promised == {}


async def test_an_error_in_one_service_stops_no_other(monkeypatch, caplog):
    async with run_objectives() as world:
        await ready(world, build_service("bad"), build_service("s", replicas_most=8))
        desk = world.control_loop._desk._services
        look = desk.observe_service

        def broken(name, workload, seen):
            if name == "bad":
                raise RuntimeError("a fault of ours")
            return look(name, workload, seen)

        monkeypatch.setattr(desk, "observe_service", broken)
        await rounds(world, 6, 90.0)
        assert world.replicas("s") >= 3
        assert "workload=bad steering=failed error=RuntimeError('a fault of ours')" in caplog.text


async def test_a_cycle_that_fails_is_reported_and_the_next_one_goes_on(monkeypatch, caplog):
    async with run_objectives() as world:
        await ready(world, build_service("s", replicas_most=8))
        turn = world.control_loop._desk.run_cycle

        def broken(_):
            raise RuntimeError("a fault of ours")

        monkeypatch.setattr(world.control_loop._desk, "run_cycle", broken)
        await world.control_loop.run_cycle()
        assert world.control_loop.failures == 1
        assert "objectives=failed" in caplog.text
        monkeypatch.setattr(world.control_loop._desk, "run_cycle", turn)
        world.control_loop.failures = 0
        await world.cycle()


async def test_more_than_are_steered_are_reported(caplog):
    async with run_objectives(workloads_most=1) as world:
        await ready(world, build_service("s"), build_service("t"))
        await world.cycle()
        assert {one.name for one in world.control_loop.objectives_status.steering.services} == {"s"}
        assert caplog.text.count("promised=2 steered=1 reason=too_many") == 1


async def test_it_runs_until_it_is_stopped_and_asks_for_pages():
    async with run_objectives(cycle_s=0.05) as world:
        await ready(world, build_service("s"))
        running = asyncio.create_task(world.control_loop.run())
        before = world.control_loop.cycles
        await wait_until(lambda: world.control_loop.cycles >= before + 3)
        assert world.pages.runs == 1
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        (url,) = world.pages.asked["s"].urls.values()
        assert url in {"http://n1:8000/0/metrics", "http://n2:8000/0/metrics"}


async def test_progress_is_of_jobs_with_a_promise_and_not_of_the_future():
    async with run_objectives() as world:
        await ready(world, build_training_job("j"), build_service("s"))
        world.control_loop.progress("j", 5.0, int(world.now_s * 1e9))
        for key in ("s", "nobody"):
            with pytest.raises(NotFound):
                world.control_loop.progress(key, 5.0, int(world.now_s * 1e9))
        with pytest.raises(InvalidArgument):
            world.control_loop.progress("j", 6.0, int((world.now_s + 60.0) * 1e9))


async def test_one_page_for_all_replicas_is_asked_once_and_counts_once():
    shared = MetricsSource(server=MetricsServer.VLLM, url="http://gateway:8000/metrics")
    async with run_objectives() as world:
        await ready(world, build_service("s", replicas=4, replicas_most=8, metrics=shared))
        assert world.pages.asked["s"].urls == {0: "http://gateway:8000/metrics"}
        await rounds(world, 4, 20.0)
        assert world.control_loop.objectives_status.services["s"].arrived_hz == pytest.approx(20.0, rel=0.05)
        assert standing(world).serving == world.replicas("s")


async def test_a_command_that_is_refused_or_breaks_stops_no_other(monkeypatch, caplog):
    async with run_objectives() as world:
        await ready(
            world,
            build_service("bad", replicas_most=8),
            build_service("worse", replicas_most=8),
            build_service("s", replicas_most=8),
        )
        scale = world.loop.scale

        async def broken(key, replicas):
            if key == "bad":
                raise Unavailable("the disk is full; try again")
            if key == "worse":
                raise RuntimeError("a fault of ours")
            return await scale(key, replicas)

        monkeypatch.setattr(world.loop, "scale", broken)
        for _ in range(6):
            for key in ("bad", "worse"):
                world.serve(key, 90.0)
            await rounds(world, 1, 90.0)
        assert world.replicas("s") >= 3
        assert (world.replicas("bad"), world.replicas("worse")) == (1, 1)
        assert "refused=the disk is full" in caplog.text
        assert "RuntimeError" in caplog.text


async def test_operators_see_how_each_promise_is_kept():
    async with run_objectives() as world:
        await ready(
            world,
            build_service("s", replicas_most=8),
            build_service("t", profile="never"),
            build_training_job("j"),
            build_training_job("k", gpus=2),
        )
        await rounds(world, 6, 90.0)
        found = world.control_loop.promises()
        assert from_plain(ListPromisesResponse, to_plain(found)) == found  # within the contract's bounds
        seen, unsteered = found.services
        assert (seen.workload_id, seen.replicas_serving, seen.replicas_wanted) == (
            "s",
            world.replicas("s"),
            standing(world).target,
        )
        assert seen.arrived_hz == pytest.approx(90.0, rel=0.05)
        assert seen.objective_s == 0.05
        assert seen.live_s is not None
        assert not seen.is_advice
        assert (unsteered.workload_id, unsteered.phase) == ("t", "unsteered")
        assert "eelctl profile import" in unsteered.reason
        assert [one.workload_id for one in found.jobs] == ["j", "k"]
        await world.enforce()
        await world.cycle()
        assert world.control_loop.promises().services[0].is_advice
        await world.loop.cancel("s")
        assert [one.workload_id for one in world.control_loop.promises().services] == ["t"]


def test_the_url_of_the_rig_is_one_of_the_contract():
    assert list(VLLM.violations()) == []
