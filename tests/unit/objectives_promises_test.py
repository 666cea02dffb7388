"""From promises, points, boards and budgets of the contract to what planners take."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders.objectives import build_metrics_window

from eelgrid_controller.objectives.observation import ObjectiveSettings
from eelgrid_controller.objectives.power.budgets import NodePowerDraw, nearest_budgets, policy_budgets
from eelgrid_controller.objectives.power.power_model import BestEffort, Deadline, MaxSlowdown
from eelgrid_controller.objectives.power.tariffs import policy_tariff
from eelgrid_controller.objectives.promises import (
    job_holdings,
    job_promise,
    metric_urls,
    related_curves,
    scaling_limits,
    server_names,
    service_target,
)
from eelgrid_controller.objectives.services.autoscaler import AutoscalerTarget
from eelgrid_controller.objectives.services.service_metrics import LiveDistribution
from eelgrid_controller.objectives.services.service_model import RequestService, TokenService
from eelgrid_controller.placement.power import (
    LIMITS_WANTED,
    PowerLimitRange,
    find_power_limit_range,
    list_limit_choices,
)
from eelgrid_controller.profiles.points import Configuration, InvalidServingValue, Point
from eelgrid_controller.profiles.queueing_model import UNCORRECTED
from eelgrid_protos import catalogue
from eelgrid_protos.messages import (
    BudgetScope,
    EnergyPrices,
    Gpu,
    Inventory,
    LatencyMetric,
    LatencyObjective,
    MetricsServer,
    MetricsSource,
    Placement,
    Policy,
    PowerBudget,
    PricePeriod,
    ResourceRequest,
    ServicePromise,
    TrainingPromise,
    Workload,
    WorkloadKind,
    WorkloadPhase,
    WorkloadSpec,
)

SETTINGS = ObjectiveSettings()
CATALOGUE = catalogue.load_catalogue()
WHOLE = ResourceRequest(cpu_milli=1000, gpu_count=1, gpu_milli=1000)
RESPONSE = LatencyObjective(metric=LatencyMetric.RESPONSE, latency_s=0.5)
INTER = LatencyObjective(metric=LatencyMetric.INTER_TOKEN, latency_s=0.05)
FIRST = LatencyObjective(metric=LatencyMetric.FIRST_TOKEN, latency_s=1.0)


def service(promise, *, request=WHOLE, limit_w=None):
    spec = WorkloadSpec(name="s", kind=WorkloadKind.INFERENCE_SERVICE, request=request, service=promise)
    placements = (Placement(replica=0, node_name="n1"), Placement(replica=7, node_name="n2"))
    return Workload(
        workload_id="w-1", spec=spec, phase=WorkloadPhase.PLACED, placements=placements, power_limit_w=limit_w
    )


def requests(**changes):
    return ServicePromise(profile="p", objectives=(RESPONSE,), **changes)


def tokens(*objectives, **changes):
    return ServicePromise(profile="p", objectives=objectives, output_tokens=100.0, **changes)


def point(rate_hz, *, batch=1, model="A100", latency=((0.5, 0.1), (0.95, 0.2)), **running):
    return Point("p", Configuration(model, batch=batch, **running), rate_hz, dict(latency))


# Services


def test_a_response_is_planned_with_the_point_of_most_throughput_that_keeps_it_alone():
    points = [
        point(10.0),
        point(30.0, batch=8, latency=((0.5, 0.3), (0.95, 0.45))),
        point(50.0, batch=32, latency=((0.95, 0.9),)),
    ]
    made = service_target(service(requests()), ["A100"], points, SETTINGS)
    assert isinstance(made, AutoscalerTarget)
    assert isinstance(made.model, RequestService)
    assert made.model.replica.capacity_hz == pytest.approx(30.0)
    hopeless = service_target(service(requests()), ["A100"], points[2:], SETTINGS)
    assert hopeless.model.replica.batch == 32


def test_tokens_are_planned_with_the_curve_of_one_configuration():
    points = [point(1000.0 * n, batch=n, latency=((0.95, 0.01 * n),)) for n in (1, 2, 4)]
    points.append(point(9000.0, batch=2, label="tp2", latency=((0.95, 0.001),)))
    made = service_target(service(tokens(INTER)), ["A100"], points, SETTINGS)
    assert made.model.curve.token_hz == (1000.0, 2000.0, 4000.0)
    assert made.model.watched_first is None


def test_the_first_token_is_watched_though_not_planned():
    points = [point(1000.0 * n, batch=n, latency=((0.95, 0.01),)) for n in (1, 2, 4)]
    made = service_target(service(tokens(FIRST, INTER)), ["A100"], points, SETTINGS)
    assert isinstance(made.model, TokenService)
    assert made.model.needed_replicas(10.0, UNCORRECTED, 8) >= 1
    slow = LiveDistribution((0.5, 2.0, float("inf")), (0.0, 100.0, 100.0))
    fast = LiveDistribution((0.5, 2.0, float("inf")), (100.0, 100.0, 100.0))
    assert made.model.is_late(_window(slow))
    assert not made.model.is_late(_window(fast))


def _window(first):
    return build_metrics_window(
        seconds=10.0, first_token=first, running=0.0, output_token_hz=100.0, context_token_hz=100.0
    )


def test_the_slowest_model_stands_for_a_mixture_and_unknown_models_are_left_to_the_live_quantiles():
    points = [point(10.0), point(40.0, model="H100")]
    assert service_target(service(requests()), ["H100", "A100"], points, SETTINGS).model.replica.capacity_hz == 10.0
    assert service_target(service(requests()), ["H100", "B200"], points, SETTINGS).model.replica.capacity_hz == 40.0


@pytest.mark.parametrize(
    ("made", "models", "points", "words"),
    [
        (service(requests()), ["A100"], [], "no points; measure it and run eelctl profile import"),
        (service(requests()), ["B200"], [point(1.0)], "no point of 1 x B200 at its power limit"),
        (service(requests()), [], [point(1.0)], "no replica is placed on a GPU"),
        (service(requests(), limit_w=300.0), ["A100"], [point(1.0)], "at its power limit"),
        (
            service(requests(), request=ResourceRequest(gpu_count=1, gpu_milli=500)),
            ["A100"],
            [point(1.0)],
            "a share of",
        ),
        (service(tokens(INTER)), ["A100"], [point(1.0, latency=((0.5, 0.1),))], "0.95 was not measured"),
        (service(tokens(INTER)), ["A100"], [point(1.0, latency=())], "cannot be used"),
    ],
)
def test_without_a_point_there_is_a_reason_and_a_remedy(made, models, points, words):
    found = service_target(made, models, points, SETTINGS)
    assert isinstance(found, str)
    assert words in found


def test_a_point_of_the_limit_that_the_replicas_run_at_is_taken():
    points = [point(10.0), point(8.0, power_limit_w=300.0)]
    assert (
        service_target(service(requests(), limit_w=300.2), ["A100"], points, SETTINGS).model.replica.capacity_hz == 8.0
    )


def test_bounds_of_the_scaler_come_from_the_promise_and_staleness_from_the_rounds():
    limits = scaling_limits(requests(replicas_least=2, replicas_most=9, start_s=33.0), SETTINGS)
    assert (limits.least, limits.most, limits.start_s) == (2, 9, 33.0)
    assert limits.stale_after_s == SETTINGS.stale_rounds * SETTINGS.scrape_s


def test_pages_are_where_the_template_says():
    source = MetricsSource(server=MetricsServer.VLLM, url="http://{node}:8000/{replica}/metrics")
    assert metric_urls(source, service(requests())) == {
        0: "http://n1:8000/0/metrics",
        7: "http://n2:8000/7/metrics",
    }


def test_every_server_of_the_contract_has_names():
    for server in MetricsServer:
        if server is not MetricsServer.UNSPECIFIED:
            source = MetricsSource(server=server, url="http://h", latency_histogram="x_seconds", waiting_gauge="w")
            assert server_names(source).response.names or server_names(source).response.summaries
    with pytest.raises(InvalidServingValue):
        server_names(MetricsSource(server=MetricsServer.UNSPECIFIED, url="http://h"))


# Jobs


def job(training, *, nodes=("n1", "n1", "n2"), placed_ns=10**18):
    spec = WorkloadSpec(name="j", kind=WorkloadKind.TRAINING_JOB, request=WHOLE, training=training, replicas=len(nodes))
    placements = tuple(
        Placement(replica=number, node_name=name, gpu_uuids=(f"g{number}",)) for number, name in enumerate(nodes)
    )
    return Workload(
        workload_id="w-2", spec=spec, phase=WorkloadPhase.PLACED, placements=placements, placed_ns=placed_ns
    )


def test_promises_of_jobs():
    assert job_promise(job(TrainingPromise(slowdown_most=0.05))) == MaxSlowdown(0.05)
    assert job_promise(job(TrainingPromise(energy_weight=0.3))) == BestEffort(0.3)
    deadline = TrainingPromise(work=100.0, deadline_ns=10**18 + 3600 * 10**9)
    assert job_promise(job(deadline)) == Deadline(100.0, 3600.0)
    passed = TrainingPromise(work=100.0, deadline_ns=10**18 - 1)
    assert job_promise(job(passed)).time_s == 1.0


def test_a_holding_for_each_node():
    made = job_holdings(job(TrainingPromise(slowdown_most=0.1)), {"n1": 800.0}, {"n2": ("rack/r",)})
    assert [(one.name, one.node, one.gpus, one.budgets, one.restored_w) for one in made] == [
        ("w-2/n1", "n1", 2, (), 800.0),
        ("w-2/n2", "n2", 1, ("rack/r",), None),
    ]


@given(st.lists(st.tuples(st.floats(50, 400), st.floats(0, 1000)), min_size=1, max_size=5))
def test_limits_fall_from_the_least_default_to_no_less_than_any_board_takes(pairs):
    boards = [PowerLimitRange(least, least + more) for least, more in pairs]
    limits = list_limit_choices(boards)
    assert 1 <= len(limits) <= LIMITS_WANTED
    assert limits[0] == min(board.default_w for board in boards)
    assert all(high > low for high, low in itertools.pairwise(limits))
    if len(limits) > 1:
        assert limits[-1] >= max(board.least_w for board in boards) - 1e-6


def test_limits_of_usual_boards():
    assert list_limit_choices([PowerLimitRange(100.0, 250.0)]) == (250.0, 225.0, 200.0, 175.0, 150.0, 125.0, 100.0)
    assert list_limit_choices([PowerLimitRange(200.0, 700.0)]) == tuple(700.0 - 50.0 * n for n in range(11))


def test_a_board_is_known_by_its_driver_or_the_catalogue_or_not_at_all():
    told = Gpu(uuid="g", index=0, product="p", model="m", power_limit_default_w=300.0, power_limit_min_w=100.0)
    assert find_power_limit_range(told, CATALOGUE) == PowerLimitRange(100.0, 300.0)
    key = next(key for key, product in CATALOGUE.products.items() if product.power_min_w)
    product = CATALOGUE.products[key]
    by_key = Gpu(uuid="g", index=0, product="p", model="m", catalogue_key=key)
    assert find_power_limit_range(by_key, CATALOGUE) == PowerLimitRange(product.power_min_w, product.power_default_w)
    assert find_power_limit_range(Gpu(uuid="g", index=0, product="p", model="m"), CATALOGUE) is None


def test_relatives_are_curves_of_several_limits_on_the_same_model():
    def at(name, limit_w, model="A100", **changes):
        return Point(
            name, Configuration(model, power_limit_w=limit_w, **changes), limit_w / 100.0, power_w=limit_w * 0.9
        )

    points = [
        at("a", 250.0),
        at("b", 250.0),
        at("a", 200.0),
        at("b", 200.0, "V100"),
        at("c", 250.0, batch=2),
        at("c", 150.0, batch=2),
    ]
    found = related_curves(points, "A100")
    assert [(curve.workload, curve.limits_w) for curve in found] == [("a", (200.0, 250.0)), ("c", (150.0, 250.0))]


# Budgets and prices


def node(name, other_w=0.0, *topology):
    return NodePowerDraw(Inventory(node_name=name, cpu_milli=1, memory_bytes=1, topology=topology), other_w)


def budget(scope, limit_w, name=""):
    return PowerBudget(scope=scope, limit_w=limit_w, name=name)


CLUSTER, RACK, NODE = BudgetScope.CLUSTER, BudgetScope.RACK, BudgetScope.NODE


def test_budgets_make_a_tree_and_others_count_on_every_level():
    policy = Policy(budgets=(budget(CLUSTER, 1000.0), budget(RACK, 500.0, "r1"), budget(NODE, 200.0, "n1")))
    nodes = [node("n1", 10.0, "z", "r1"), node("n2", 20.0, "z", "r1"), node("n3", 40.0, "z", "r2")]
    tree = {one.name: one for one in policy_budgets(policy, nodes).all}
    assert {name: (one.parent, one.other_w) for name, one in tree.items()} == {
        "cluster": (None, 70.0),
        "rack/r1": ("cluster", 30.0),
        "node/n1": ("rack/r1", 10.0),
    }
    assert [nearest_budgets(policy, one.inventory) for one in nodes] == [("node/n1",), ("rack/r1",), ("cluster",)]


def test_budgets_without_a_cluster_or_with_names_that_are_nowhere():
    policy = Policy(budgets=(budget(RACK, 500.0, "r9"), budget(NODE, 200.0, "gone"), budget(NODE, 100.0, "gone")))
    tree = {one.name: one for one in policy_budgets(policy, [node("n1", 10.0, "z", "r1")]).all}
    assert {name: (one.parent, one.limit_w, one.other_w) for name, one in tree.items()} == {
        "rack/r9": (None, 500.0, 0.0),
        "node/gone": (None, 100.0, 0.0),
    }
    assert nearest_budgets(policy, node("n1", 0.0, "z", "r1").inventory) == ()
    assert policy_budgets(Policy(), []).all == ()


def test_prices_become_joules_and_monday_is_where_it_is():
    assert policy_tariff(None) is None
    prices = EnergyPrices(
        periods=(
            PricePeriod(begins_minute=0, price_per_kwh=0.36, carbon_kg_per_kwh=0.36),
            PricePeriod(begins_minute=8 * 60, price_per_kwh=0.72),
        ),
        pue=1.5,
        carbon_price_per_kg=0.5,
        utc_offset_minutes=60,
    )
    tariff = policy_tariff(prices)
    monday_s = 1_700_438_400.0  # 2023-11-20 00:00 UTC, a Monday; local midnight is an hour earlier
    night = 1.5 * (1e-7 + 0.5 * 1e-7)
    assert tariff.price_at(monday_s - 3600.0) == pytest.approx(night)
    assert tariff.price_at(monday_s + 7 * 3600.0 - 1.0) == pytest.approx(night)
    assert tariff.price_at(monday_s + 7 * 3600.0) == pytest.approx(1.5 * 2e-7)
    assert tariff.price_at(monday_s - 3601.0) == pytest.approx(1.5 * 2e-7)
