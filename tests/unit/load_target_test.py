"""Services whose replicas follow a load: what is read, what is refused, and the whole loop without any profile."""

import itertools
import json
import math
from dataclasses import replace

import pytest
from tests.builders.objectives import (
    VLLM,
    build_metrics_window,
    build_powered_node,
    build_service,
    build_service_status,
    run_objectives,
)
from tests.unit.objectives_services_test import rounds, standing

from eelgrid_controller.objectives.services.autoscaler import (
    AutoscalerTarget,
    ScalingLimits,
    on_window,
    start_autoscaler,
)
from eelgrid_controller.objectives.services.service_metrics import LiveDistribution
from eelgrid_controller.objectives.services.service_model import UNCORRECTED, LoadService
from eelgrid_controller.server.grpc.overview import count_promises
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import WorkloadSubmitted, event_from_plain, event_to_plain
from eelgrid_protos.messages import (
    ListPromisesResponse,
    LoadMetric,
    LoadTarget,
    MetricsServer,
    MetricsSource,
    ResourceRequest,
    ServicePromise,
)
from eelgrid_protos.schema import InvalidMessage, check_message

GENERIC = MetricsSource(server=MetricsServer.GENERIC, url="http://{node}/m", latency_histogram="app_latency_seconds")


def follow(metric, per_replica, *, metrics=VLLM, **fields):
    target = LoadTarget(metric=LoadMetric[metric], per_replica=per_replica)
    return ServicePromise(load_target=target, metrics=metrics, start_s=10.0, replicas_most=8, **fields)


def build_follower(key="s", *promise, request=None, **fields):
    plain = build_service(key)
    spec = replace(plain.spec, service=follow(*(promise or ("TOKENS", 3000.0)), **fields))
    return replace(plain, spec=spec if request is None else replace(spec, request=request))


@pytest.mark.parametrize(
    ("promise", "field"),
    [
        (lambda: follow("UNSPECIFIED", 1.0), "load_target.metric"),
        (lambda: follow("TOKENS", 0.0), "load_target.per_replica"),
        (lambda: follow("TOKENS", 1.0, metrics=None), "metrics"),
        (lambda: follow("TOKENS", 1.0, metrics=GENERIC), "load_target.metric"),
        (lambda: follow("IN_FLIGHT", 1.0, metrics=GENERIC), "metrics.waiting_gauge"),
        (lambda: follow("IN_FLIGHT", 1.0, metrics=replace(VLLM, server=MetricsServer.TRITON)), "load_target.metric"),
        (
            lambda: follow("REQUESTS", 1.0, metrics=replace(GENERIC, latency_histogram="", work_counter="steps_total")),
            "metrics.latency_histogram",
        ),
        (lambda: follow("TOKENS", 1.0, rate_hz=2.0), "rate_hz"),
        (lambda: follow("TOKENS", 1.0, profile="llm"), "profile"),
        (lambda: follow("TOKENS", 1.0, slices=True), "slices"),
        (lambda: follow("TOKENS", 1.0, objectives=build_service("s").spec.service.objectives), "objectives"),
        (lambda: follow("TOKENS", 1.0, replicas_least=9), "replicas_least"),
        (lambda: ServicePromise(profile="llm"), "objectives"),
        (lambda: ServicePromise(objectives=build_service("s").spec.service.objectives, output_tokens=1.0), "profile"),
    ],
)
def test_a_promise_is_objectives_with_a_profile_or_a_load_that_can_be_read(promise, field):
    with pytest.raises(InvalidMessage) as refused:
        check_message(promise())
    assert [one.field for one in refused.value.violations] == [field]


@pytest.mark.parametrize("metric", ["REQUESTS", "IN_FLIGHT"])
def test_every_server_tells_requests_and_with_a_gauge_those_in_flight(metric):
    check_message(follow(metric, 4.0, metrics=replace(GENERIC, waiting_gauge="app_waiting")))


def test_the_journal_has_a_load_target_only_where_there_is_one():
    for request, is_there in ((build_follower(), True), (build_service("s"), False)):
        event = WorkloadSubmitted(time_ns=1, workload_id="s", spec=request.spec)
        kind, body = event_to_plain(event)
        assert ("load_target" in body["spec"]["service"]) is is_there
        assert event_from_plain(kind, json.loads(json.dumps(body))) == event


@pytest.mark.parametrize(
    ("metric", "window", "amount", "of_waiting"),
    [
        ("REQUESTS", {"waiting": 9.0}, 12.0, 1.0),
        ("REQUESTS", {"arrived_hz": None}, None, None),
        ("IN_FLIGHT", {"running": 20.0, "waiting": 3.0}, 23.0, 0.0),
        ("IN_FLIGHT", {"running": None, "waiting": 3.0}, 3.0, 0.0),
        ("IN_FLIGHT", {"running": None, "waiting": None}, None, None),
        # 12 requests a second of 100 tokens each; of those that come to wait, 60 in 30 s, as many.
        ("TOKENS", {"output_token_hz": 1200.0}, 1200.0, 100.0),
        ("TOKENS", {"output_token_hz": 1200.0, "growth": 60.0}, 1400.0, 100.0),
        ("TOKENS", {"output_token_hz": 1200.0, "growth": -60.0}, 1200.0, 100.0),
        # A burst of long answers: one has finished, 49 go on, and 20 came to wait.
        (
            "TOKENS",
            {"output_token_hz": 3000.0, "finished_hz": 1 / 15, "seconds": 15.0, "running": 49.0, "growth": 20.0},
            4200.0,
            900.0,
        ),
        ("TOKENS", {"output_token_hz": 0.0, "finished_hz": 0.0, "running": None, "growth": 60.0}, 0.0, 0.0),
        ("TOKENS", {"output_token_hz": None}, None, None),
    ],
)
def test_a_window_says_what_there_is_to_carry(metric, window, amount, of_waiting):
    load = LoadService(LoadMetric[metric], 5.0).read_load(build_metrics_window(12.0, **window))
    assert (None if load is None else (load.amount, load.of_waiting)) == (
        None if amount is None else (amount, of_waiting)
    )


def test_what_its_owner_says_of_an_answer_counts_until_enough_have_finished():
    service = LoadService(LoadMetric.TOKENS, 5.0, output_tokens=2000.0)
    few = build_metrics_window(1 / 15, seconds=15.0, output_token_hz=3000.0, running=49.0, growth=20.0)
    many = build_metrics_window(2.0, seconds=15.0, output_token_hz=3000.0, growth=15.0)
    assert [service.read_load(window)[:2] for window in (few, many)] == [
        (pytest.approx(3000.0 + 2000.0 * 20 / 15), 2000.0),
        (pytest.approx(4500.0), 1500.0),
    ]


def test_a_load_of_whole_replicas_needs_no_more():
    service = LoadService(LoadMetric.TOKENS, 0.1)
    assert [service.needed_replicas(load, UNCORRECTED, 9) for load in (0.0, 0.1, 0.3, 0.7, 0.8001, 50.0)] == [
        0,
        1,
        3,
        7,
        9,
        9,
    ]
    # What a page says may be anything.
    assert [service.needed_replicas(load, UNCORRECTED, 9) for load in (math.inf, math.nan, 1e308)] == [9, 9, 9]


async def test_replicas_follow_tokens_without_a_profile_or_a_verdict():
    async with run_objectives() as world:
        await world.join(build_powered_node("n1"), build_powered_node("n2"))
        await world.enforce("p")
        await world.loop.submit(build_follower())
        await world.cycle()
        await rounds(world, 3, 5.0)
        assert world.replicas("s") == 1
        # 90 requests of 100 tokens, 3,000 of each replica, and what the jump has the forecast allow for.
        await rounds(world, 30, 90.0)
        assert 3 <= world.replicas("s") <= 5
        assert "tokens a second in 10 s need" in standing(world).reason
        found = world.control_loop.promises()
        (status,) = found.services
        assert (status.load_target, status.objective_s) == (
            LoadTarget(metric=LoadMetric.TOKENS, per_replica=3000.0),
            0.0,
        )
        assert status.live_s is not None
        assert (status.modelled_s, status.slowness, status.slowness_error) == (None, 1.0, 0.0)
        assert {one.value for one, count in world.control_loop.counts.attainment.total.items() if count} == {"unjudged"}
        await rounds(world, 30, 5.0)
        assert world.replicas("s") == 1


async def test_a_target_beyond_what_a_replica_can_give_is_met_by_those_that_wait():
    """A full replica gives 4,000 tokens a second, whatever comes: only the queue says that it is too few."""
    async with run_objectives() as world:
        await world.join(build_powered_node("n1"), build_powered_node("n2"))
        await world.enforce("p")
        await world.loop.submit(build_follower("s", "TOKENS", 5000.0))
        await world.cycle()
        await rounds(world, 12, 90.0)
        assert world.replicas("s") >= 3
        # Of 1,350 that came in the last window.
        assert sum(one.waiting for one in world.servers.values()) < 10


async def test_a_service_without_gpus_follows_its_requests():
    async with run_objectives() as world:
        await world.join(build_powered_node("n1"))
        await world.enforce("p")
        await world.loop.submit(
            build_follower("s", "REQUESTS", 20.0, request=ResourceRequest(cpu_milli=1000, memory_bytes=2**30))
        )
        await world.cycle()
        await rounds(world, 8, 70.0)
        assert world.replicas("s") in (4, 5)


async def test_servers_that_do_not_tell_the_load_are_named():
    async with run_objectives() as world:
        await world.join(build_powered_node("n1"))
        await world.enforce("p")
        await world.loop.submit(build_follower("s", "TOKENS", 20.0))
        await world.cycle()
        for _ in range(3):
            world.serve("s", 5.0)
            scraped = world.pages.rounds["s"]
            pages = {
                key: replace(page, samples={n: v for n, v in page.samples.items() if "generation_tokens" not in n})
                for key, page in scraped.pages.items()
            }
            world.pages.rounds["s"] = scraped._replace(pages=pages)
            await world.cycle(15.0)
        assert "no tokens a second in the metrics" in standing(world).reason


def test_live_is_the_95th_percentile_of_the_response():
    response = LiveDistribution(borders_s=(0.1, 0.2, float("inf")), counts=(90.0, 100.0, 100.0))
    service = LoadService(LoadMetric.REQUESTS, 5.0)
    assert service.live_quantile(build_metrics_window(response=response)).value_s == pytest.approx(0.15)
    assert service.live_quantile(build_metrics_window()) is None


def test_services_that_follow_a_load_count_as_no_objective():
    target = LoadTarget(metric=LoadMetric.TOKENS, per_replica=2500.0)
    rows = [
        build_service_status("kept", live_s=0.1),
        build_service_status("follows", objective_s=0.0, live_s=0.7, load_target=target),
        build_service_status("stuck", objective_s=0.0, load_target=target, phase="unsteered"),
    ]
    found = count_promises(ListPromisesResponse(services=tuple(rows)), ClusterState())
    assert (found.kept, found.at_risk, found.broken, found.unknown) == (1, 1, 0, 0)


def test_whatever_pages_say_the_number_stays_within_its_bounds():
    odd = [0.0, math.nan, math.inf, 1e308, -5.0, None]
    for metric in [*LoadMetric][1:]:
        promised = AutoscalerTarget(LoadService(metric, 5.0), ScalingLimits(most=8))
        for arrived, waiting, growth, tokens, finished in itertools.product(odd, repeat=5):
            window = build_metrics_window(
                arrived, waiting=waiting, growth=growth, output_token_hz=tokens, finished_hz=finished, running=tokens
            )
            _, advice = on_window(promised, start_autoscaler(promised, 1), window, 100.0)
            assert 1 <= advice.decision.replicas <= 8
