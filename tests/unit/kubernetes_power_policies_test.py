"""PowerPolicy objects: how they are read, how several make one policy, and what each is told."""

from dataclasses import replace

import pytest

from eelgrid_controller.engines.kubernetes.model.power_policy import (
    MAX_POLICIES,
    MAX_SHOWN,
    AppliedPolicy,
    PlacePower,
    PolicyRecords,
    PowerPolicyMerger,
    build_policy_status,
    parse_power_policy,
)
from eelgrid_controller.engines.kubernetes.model.quantities import KubernetesUnreadable
from eelgrid_controller.engines.kubernetes.model.status_reporting import ConditionSet
from eelgrid_controller.state.policy import find_policy_violations
from eelgrid_protos.messages import (
    OBJECTIVES,
    BudgetScope,
    EnergyPrices,
    EnforcementMode,
    Policy,
    PoolMode,
    PowerBudget,
    PricePeriod,
)

NS = 1_000_000_000
CLUSTER = {"scope": "Cluster", "limitWatts": 1000}
RACK = {"scope": "Rack", "name": "r1", "limitWatts": 500}


def made(name, spec, *, age=0, generation=1, status=None, **metadata):
    """An object as an API server gives it; the larger the age, the younger."""
    head = {
        "name": name,
        "uid": f"uid-{name}",
        "generation": generation,
        "resourceVersion": "1",
        "creationTimestamp": f"2026-11-22T07:00:{age:02d}Z",
        **metadata,
    }
    return {"metadata": head, "spec": spec, **({"status": status} if status else {})}


def budgets(policy):
    return {(one.scope.name, one.name): one.limit_w for one in policy.budgets}


class World:
    """A policy, what is remembered, and objects over them."""

    def __init__(self, policy=None):
        self.policy = policy or Policy()
        self.memory = PolicyRecords()
        self.nodes = {"n1": {"rack": "r1"}, "n2": {"rack": "r2"}}
        self.machine = PowerPolicyMerger(find_policy_violations)

    def settle(self, *objects):
        """Carry out what follows; the standings by name."""
        found = self.machine.merge_policies(objects, self.nodes, self.policy, self.memory)
        if found.policy != self.policy:
            self.policy = replace(found.policy, revision=self.policy.revision + 1)
        self.memory = found.after
        return {one.found["metadata"]["name"]: one for one in found.standings}

    def status(self, standing, draws=None, *, fault="", at_s=0):
        limits = {
            "cluster" if not one.name else f"{one.scope.name.lower()}/{one.name}": one.limit_w
            for one in self.policy.budgets
        }
        return build_policy_status(
            standing, AppliedPolicy(self.policy.revision, limits, fault), draws or {}, at_ns=at_s * NS
        )


def said(status, type_):
    found = ConditionSet.from_json(status["conditions"]).get(type_)
    return None if found is None else (found.status, found.reason)


PRICES = {
    "pue": 1.5,
    "periods": [
        {"from": "sat 07:00", "pricePerKwh": 0.1},
        {"from": "07:00", "pricePerKwh": 0.3, "carbonKgPerKwh": 0.4},
    ],
}


def test_an_object_is_read_by_the_contracts_rules():
    found = parse_power_policy(made("a", {"objective": "energy", "prices": PRICES, "budgets": [CLUSTER]}, generation=3))
    assert (found.name, found.generation, found.created_s) == ("a", 3, 1_795_330_800)
    assert found.values["objective"].weights == OBJECTIVES["energy"]
    prices = found.values["prices"]
    assert (prices.pue, prices.currency, len(prices.periods)) == (1.5, "EUR", 7)
    assert prices.periods[5] == PricePeriod(begins_minute=5 * 1440 + 420, price_per_kwh=0.1, carbon_kg_per_kwh=0.0)
    assert found.values["budget/cluster"] == 1000.0


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ([1], "spec"),
        ({"objective": "speed"}, "spec.objective"),
        ({"placement": 3}, "spec.placement"),
        ({"pools": {"name": "a"}}, "spec.pools"),
        ({"pools": [{"name": "a", "mode": "Force"}]}, "spec.pools[0].mode"),
        ({"pools": [{"name": "", "mode": "Observe"}]}, "spec.pools[0].name"),
        ({"pools": [{"name": "a", "mode": "Observe"}] * 2}, "spec.pools[1].name"),
        ({"budgets": [{"scope": "Room", "limitWatts": 1}]}, "spec.budgets[0].scope"),
        ({"budgets": [{"scope": "Cluster", "limitWatts": "1kW"}]}, "spec.budgets[0].limitWatts"),
        ({"budgets": [{"scope": "Cluster", "limitWatts": -1}]}, "spec.budgets[0].limitWatts"),
        ({"budgets": [{"scope": "Rack", "limitWatts": 1}]}, "spec.budgets[0].name"),
        ({"budgets": [RACK, RACK]}, "spec.budgets[1]"),
        ({"budgets": [{**RACK, "nodeSelector": {"matchLabels": {"a": "b"}}}]}, "spec.budgets[0].nodeSelector"),
        ({"budgets": [{"scope": "Node", "limitWatts": 1, "nodeSelector": {}}]}, "spec.budgets[0].nodeSelector"),
        (
            {
                "budgets": [
                    {
                        "scope": "Node",
                        "limitWatts": 1,
                        "nodeSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]},
                    }
                ]
            },
            "spec.budgets[0].nodeSelector.matchExpressions",
        ),
        ({"prices": {"periods": [{"from": "7:00", "pricePerKwh": 1}]}}, "spec.prices.periods[0].from"),
        ({"prices": {"periods": [{"from": "07:00", "price": 1}]}}, "spec.prices.periods[0].price"),
        ({"prices": {"periods": [{"from": "07:00", "pricePerKwh": -1}]}}, "spec.prices.periods[0].pricePerKwh"),
        ({"prices": {"periods": []}}, "spec.prices.periods"),
        ({"prices": {**PRICES, "pue": 0.5}}, "spec.prices.pue"),
    ],
)
def test_what_cannot_be_read_is_named(spec, field):
    with pytest.raises(KubernetesUnreadable) as caught:
        parse_power_policy({"metadata": {"uid": "u", "name": "a"}, "spec": spec})
    assert caught.value.field == field


def test_node_selectors_follow_labels():
    world = World()
    lines = [{"key": "rack", "operator": "NotIn", "values": ["r2"]}, {"key": "gone", "operator": "DoesNotExist"}]
    spec = {
        "budgets": [
            {"scope": "Node", "limitWatts": 700, "nodeSelector": {"matchExpressions": lines}},
            {"scope": "Node", "limitWatts": 900, "nodeSelector": {"matchLabels": {"rack": "r1"}}},
        ]
    }
    world.settle(made("a", spec))
    assert budgets(world.policy) == {("NODE", "n1"): 700.0}
    world.nodes["n3"] = {"rack": "r1", "gone": ""}
    world.settle(made("a", spec))
    assert budgets(world.policy) == {("NODE", "n1"): 700.0, ("NODE", "n3"): 900.0}
    world.nodes = {"n2": {"rack": "r2"}}
    one = world.settle(made("a", spec))["a"]
    assert budgets(world.policy) == {}
    assert said(world.status(one), "Accepted") == (True, "NoNodeSelected")


def test_of_one_place_the_tightest_budget_counts():
    world = World()
    told = world.settle(
        made("old", {"budgets": [CLUSTER, RACK]}), made("new", {"budgets": [{**CLUSTER, "limitWatts": 800}]}, age=1)
    )
    assert budgets(world.policy) == {("CLUSTER", ""): 800.0, ("RACK", "r1"): 500.0}
    status = world.status(told["old"])
    assert said(status, "InForce") == (True, "InPart")
    assert said(status, "Conflicting") == (False, "NoConflict")
    assert status["budgets"][0] == {"scope": "Cluster", "limitWatts": 1000, "inForceWatts": 800, "inForceBy": "new"}
    assert said(world.status(told["new"]), "InForce") == (True, "Whole")
    world.settle(made("old", {"budgets": [CLUSTER, RACK]}))
    assert budgets(world.policy)["CLUSTER", ""] == 1000.0


def test_of_other_fields_the_oldest_object_counts_and_the_other_is_reported():
    world = World()
    young = made("a-young", {"objective": "energy", "pools": [{"name": "p", "mode": "Enforce"}]}, age=1)
    old = made("z-old", {"objective": "performance"})
    for order in ((young, old), (old, young)):
        told = world.settle(*order)
        assert world.policy.objective == "performance"
        assert world.policy.weights == OBJECTIVES["performance"]
        assert world.policy.pools == (PoolMode(pool="p", mode=EnforcementMode.ENFORCE),)
        status = world.status(told["a-young"])
        assert said(status, "Conflicting") == (True, "OlderObjectCounts")
        assert "objective is that of z-old" in str(status["conditions"])
        assert status["inForce"] == ["pool p: enforce"]
        assert said(world.status(told["z-old"]), "Conflicting") == (False, "NoConflict")
    told = world.settle(made("a-young", {"objective": "energy"}, age=1, generation=2), old)
    assert said(world.status(told["a-young"]), "InForce") == (False, "Overruled")
    told = world.settle(young, made("z-old", {"objective": "energy"}, generation=2))
    assert said(world.status(told["a-young"]), "Conflicting") == (False, "NoConflict"), "they agree"


def test_removal_puts_back_what_was_there_and_touches_nothing_else():
    prices = EnergyPrices(periods=(PricePeriod(begins_minute=0, price_per_kwh=0.2),))
    rack = PowerBudget(scope=BudgetScope.RACK, name="r9", limit_w=9.0)
    before = Policy(
        objective="energy",
        weights=OBJECTIVES["energy"],
        lease_s=33.0,
        prices=prices,
        pools=(PoolMode(pool="mine", mode=EnforcementMode.ENFORCE), PoolMode(pool="p", mode=EnforcementMode.OBSERVE)),
        budgets=(rack, PowerBudget(scope=BudgetScope.CLUSTER, limit_w=2000.0)),
    )
    world = World(before)
    spec = {
        "objective": "performance",
        "placement": "fgd",
        "prices": PRICES,
        "budgets": [CLUSTER, RACK],
        "pools": [{"name": "p", "mode": "Enforce", "partitioned": True}],
    }
    world.settle(made("a", spec))
    assert world.policy.placement == "fgd"
    assert world.policy.lease_s == 33.0
    assert budgets(world.policy) == {("RACK", "r9"): 9.0, ("CLUSTER", ""): 1000.0, ("RACK", "r1"): 500.0}
    world.machine = PowerPolicyMerger(find_policy_violations)  # a restart: memory lies on the disk
    world.settle()
    assert replace(world.policy, revision=0) == before
    assert world.memory == PolicyRecords()


def test_what_an_operator_changes_meanwhile_is_put_back_last():
    world = World()
    one = made("a", {"budgets": [CLUSTER]})
    world.settle(one)
    # eelctl policy set --budget cluster=300 --lease 20
    budget = PowerBudget(scope=BudgetScope.CLUSTER, limit_w=300.0)
    world.policy = replace(world.policy, budgets=(budget,), lease_s=20.0)
    world.settle(one)
    assert (budgets(world.policy), world.policy.lease_s) == ({("CLUSTER", ""): 1000.0}, 20.0)
    world.settle(made("a", {"budgets": [{**CLUSTER, "limitWatts": 1100}]}, generation=2))
    world.settle()
    assert (budgets(world.policy), world.policy.lease_s) == ({("CLUSTER", ""): 300.0}, 20.0)


def test_an_object_that_is_being_deleted_counts_no_more():
    world = World()
    world.settle(made("a", {"budgets": [CLUSTER]}))
    assert world.settle(made("a", {"budgets": [CLUSTER]}, deletionTimestamp="2026-11-22T08:00:00Z")) == {}
    assert world.policy.budgets == ()


def test_what_cannot_be_read_leaves_the_last_good_one_in_force():
    world = World()
    world.settle(made("a", {"budgets": [CLUSTER]}, generation=4))
    world.machine = PowerPolicyMerger(find_policy_violations)
    one = world.settle(made("a", {"budgets": [{**CLUSTER, "limitWatts": 5}], "placement": "nonsense"}, generation=5))[
        "a"
    ]
    assert budgets(world.policy) == {("CLUSTER", ""): 1000.0}
    status = world.status(one)
    assert status["observedGeneration"] == 5
    assert said(status, "Accepted") == (False, "Invalid")
    assert "spec.placement" in str(status["conditions"])
    assert said(status, "InForce") == (True, "EarlierGeneration")
    fresh = world.settle(made("b", {"objective": "speed"}))["b"]
    assert said(world.status(fresh), "InForce") == (False, "NotAccepted")
    assert world.policy.budgets == ()


def test_objects_that_are_too_many_are_reported():
    world = World()
    told = world.settle(*(made(f"p{n:03d}", {"budgets": [CLUSTER]}) for n in range(MAX_POLICIES + 1)))
    assert "one too many" in told[f"p{MAX_POLICIES}"].fault
    pools = [{"name": f"x{n}", "mode": "Observe"} for n in range(1000)]
    told = world.settle(made("a", {"pools": pools}), made("b", {"pools": [{"name": "y", "mode": "Enforce"}]}, age=1))
    assert "pools" in told["b"].fault
    assert len(world.policy.pools) == 1000


def test_watts_against_budgets():
    world = World()
    spec = {"budgets": [CLUSTER, RACK, {"scope": "Node", "name": "n1", "limitWatts": 200}]}
    one = world.settle(made("a", spec))["a"]
    status = world.status(one)
    assert said(status, "WithinBudget") == (None, "NotMeasured")
    assert "powerWatts" not in status
    draws = {"cluster": PlacePower(600.4), "rack/r1": PlacePower(400.0), "node/n1": PlacePower(90.0)}
    status = world.status(one, draws)
    assert said(status, "WithinBudget") == (True, "Kept")
    assert (status["powerWatts"], status["headroomWatts"]) == (600, 400)
    assert status["budgets"][1] == {
        "scope": "Rack",
        "name": "r1",
        "limitWatts": 500,
        "powerWatts": 400,
        "headroomWatts": 100,
    }
    assert said(world.status(one, draws | {"node/n1": PlacePower(90.0, 2)}), "WithinBudget") == (None, "PartlyMeasured")
    over = world.status(one, draws | {"rack/r1": PlacePower(510.0)})
    assert said(over, "WithinBudget") == (False, "Passed")
    assert "rack r1 draws 510 W of 500 W" in str(over["conditions"])
    bare = world.settle(made("bare", {}))["bare"]
    assert said(world.status(bare, draws), "WithinBudget") is None
    assert said(world.status(bare, draws), "InForce") == (True, "NothingNamed")


def test_a_status_changes_with_more_than_noise():
    world = World()
    one = world.settle(made("a", {"budgets": [CLUSTER]}))["a"]
    first = world.status(one, {"cluster": PlacePower(900.0)}, at_s=10)
    one = world.settle(made("a", {"budgets": [CLUSTER]}, status=first))["a"]
    assert world.status(one, {"cluster": PlacePower(919.0)}, at_s=20) == first
    assert world.status(one, {"cluster": PlacePower(921.0)}, at_s=20)["powerWatts"] == 921
    near = world.status(one, {"cluster": PlacePower(999.0)}, at_s=20)
    one = world.settle(made("a", {"budgets": [CLUSTER]}, status=near))["a"]
    passed = world.status(one, {"cluster": PlacePower(1001.0)}, at_s=30)
    assert said(passed, "WithinBudget") == (False, "Passed"), "crossing the limit is no noise"
    assert ConditionSet.from_json(passed["conditions"]).get("WithinBudget").since_s == 30
    assert ConditionSet.from_json(passed["conditions"]).get("InForce").since_s == 10


def test_a_status_is_bounded_and_says_what_it_leaves_out():
    world = World()
    world.nodes = {f"n{n}": {"a": "b"} for n in range(MAX_SHOWN + 44)}
    spec = {"budgets": [CLUSTER, {"scope": "Node", "limitWatts": 100, "nodeSelector": {"matchLabels": {"a": "b"}}}]}
    status = world.status(world.settle(made("a", spec))["a"])
    assert (len(status["budgets"]), status["budgetsNotShown"]) == (MAX_SHOWN, 45)
    assert status["budgets"][0]["scope"] == "Cluster"


def test_what_the_core_does_not_take_is_reported():
    world = World()
    status = world.status(world.settle(made("a", {"objective": "energy"}))["a"], fault="the disk is full; make room")
    assert said(status, "InForce") == (False, "NotApplied")
    assert status["inForce"] == []
