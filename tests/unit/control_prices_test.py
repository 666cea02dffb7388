"""Jobs under prices that change: dear energy is not used, promises are kept, limits do not flutter."""

import pytest
from tests.power_fleet_rig import Fleet

from eelgrid_controller.objectives.power.control_events import PricesSet
from eelgrid_controller.objectives.power.power_model import BestEffort
from eelgrid_controller.objectives.power.tariffs import EnergyTariff, StepFunction


def test_dear_energy_is_not_used_and_the_promise_is_kept():
    hour_s, prices = 3600.0, (1.0, 4.0)
    fleets = [Fleet(scatter=0.01), Fleet(scatter=0.01)]
    fleets[0].tell(PricesSet(0.0, EnergyTariff(StepFunction((0.0, hour_s), prices, 2.0 * hour_s))))
    costs = [0.0, 0.0]
    for at, fleet in enumerate(fleets):
        fleet.begin("a", ["n1"])
        for _ in range(1440):
            before = fleet.jobs["a"].energy_j
            price = prices[int(fleet.now_s // hour_s) % 2]
            fleet.run(1)
            costs[at] += price * (fleet.jobs["a"].energy_j - before)
        assert fleet.slowdown("a") <= 0.1
    tariff, flat = (cost / fleet.jobs["a"].work for cost, fleet in zip(costs, fleets, strict=True))
    assert tariff < 0.95 * flat
    assert len(fleets[0].said) < 60
    assert fleets[0].steering.controller_status().price_weight == pytest.approx(prices[0] / 2.5)
    assert fleets[0].steering.controller_status().price_per_j == 1.0


def test_best_effort_weighs_energy_by_its_price():
    fleet = Fleet()
    fleet.tell(PricesSet(0.0, EnergyTariff(StepFunction((0.0, 7200.0), (0.05, 4.0), 14_400.0))))
    fleet.begin("a", ["n1"], promise=BestEffort(0.4))
    fleet.run(700)
    cheap_w = fleet.job("a").limit_w
    fleet.run(100)
    assert fleet.job("a").limit_w < cheap_w
    fleet.tell(PricesSet(fleet.now_s, None))
    fleet.run(3)
    assert fleet.job("a").limit_w >= 200.0
    assert fleet.steering.controller_status().price_per_j is None


def test_time_is_earned_before_it_is_spent_and_limits_do_not_flutter():
    fleet = Fleet(scatter=0.01)
    fleet.tell(PricesSet(0.0, EnergyTariff(StepFunction((0.0, 3600.0), (4.0, 1.0), 7200.0))))  # dear first
    fleet.begin("a", ["n1"])
    for _ in range(720):
        fleet.run(1)
        assert fleet.slowdown("a") <= 0.1
    assert len(fleet.said) <= 60
    assert min(one.limit_w for one in fleet.said) < 250.0
