"""PowerPolicy objects in any course: objects, operators, crashes and refusals; what is left is the operator's policy."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from eelgrid_controller.engines.kubernetes.model.power_policy import (
    PolicyRecords,
    PowerPolicyMerger,
    decode_value,
    encode_value,
    policy_values,
)
from eelgrid_controller.state.policy import find_policy_violations
from eelgrid_protos.messages import OBJECTIVES, BudgetScope, EnforcementMode, Policy, PoolMode, PowerBudget

NODES = {"n1": {"a": "b"}, "n2": {}}
WATTS = st.integers(1, 3).map(lambda n: n * 100)
BUDGETS = st.fixed_dictionaries({}, optional={"Cluster": WATTS, "Rack": WATTS, "Node": WATTS, "Labels": WATTS})


def _budget_rows(chosen):
    rows = []
    for scope, watts in chosen.items():
        row = {"scope": scope, "limitWatts": watts}
        if scope == "Labels":
            row = {"scope": "Node", "limitWatts": watts, "nodeSelector": {"matchLabels": {"a": "b"}}}
        elif scope != "Cluster":
            row["name"] = "n1" if scope == "Node" else "r1"
        rows.append(row)
    return rows


SPECS = st.fixed_dictionaries(
    {"budgets": BUDGETS.map(_budget_rows)},
    optional={
        "objective": st.sampled_from(["energy", "performance"]),
        "placement": st.sampled_from(["fgd", "pwr"]),
        "pools": st.just([{"name": "p", "mode": "Enforce"}]),
    },
)
# An object is put or removed, an operator changes a field, or the controller stops between two steps of a round.
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from("abc"), st.one_of(SPECS, st.just({"objective": "speed"}))),
        st.tuples(st.just("remove"), st.sampled_from("abc"), st.none()),
        st.tuples(st.just("operator"), st.sampled_from(["objective", "budget", "pool", "lease"]), st.integers(1, 3)),
        st.tuples(st.just("crash"), st.sampled_from(["ahead", "changed", "none"]), st.none()),
    ),
    max_size=10,
)


def _operate(policy, what, number):
    match what:
        case "objective":
            # What an operator says that is in force already says nothing, so these are weights that no object has.
            return replace(policy, objective="custom", weights=replace(OBJECTIVES["energy"], power=float(number)))
        case "budget":
            rest = tuple(one for one in policy.budgets if one.scope is not BudgetScope.CLUSTER)
            return replace(policy, budgets=(*rest, PowerBudget(scope=BudgetScope.CLUSTER, limit_w=7.0 + number)))
        case "pool":
            rest = tuple(one for one in policy.pools if one.pool != "p")
            mode = EnforcementMode.OBSERVE
            return replace(policy, pools=(*rest, PoolMode(pool="p", mode=mode, partitioned=number > 1)))
    return replace(policy, lease_s=10.0 + number)


class Controller:
    """A policy, a file and objects; each round as the shell carries it out, cut off where it is said."""

    def __init__(self):
        self.policy, self.disk, self.operators = Policy(), PolicyRecords(), Policy()
        self.objects = {}
        self.ages = 0
        self.machine = PowerPolicyMerger(find_policy_violations)

    def round(self, until="end"):
        found = self.machine.merge_policies(self.objects.values(), NODES, self.policy, self.disk)
        self.disk = _through_the_file(found.ahead)
        if until == "ahead":
            return
        self.policy = found.policy
        if until == "changed":
            return
        self.disk = _through_the_file(found.after)

    def put(self, name, spec):
        before = self.objects.get(name)
        self.ages += 1
        head = {"name": name, "uid": f"{name}-{self.ages}", "generation": 1}
        head["creationTimestamp"] = f"2026-11-22T07:00:{self.ages:02d}Z"
        if before is not None:
            head = {**before["metadata"], "generation": before["metadata"]["generation"] + 1}
        self.objects[name] = {"metadata": head, "spec": spec}


def _through_the_file(memory):
    records = {
        key: one._replace(
            former=decode_value(key, encode_value(one.former)),
            puts=tuple(decode_value(key, encode_value(put)) for put in one.puts),
        )
        for key, one in memory.records.items()
    }
    assert records == memory.records
    return PolicyRecords(records, memory.good)


def _plainly(policy):
    return policy_values(policy), policy.lease_s


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_whatever_happened_without_objects_the_policy_is_what_operators_said(course):
    world = Controller()
    for what, name, value in course:
        match what:
            case "put":
                world.put(name, value)
            case "remove":
                world.objects.pop(name, None)
            case "operator":
                world.policy = _operate(world.policy, name, value)
                world.operators = _operate(world.operators, name, value)
            case "crash":
                world.round(name)
                world.machine = PowerPolicyMerger(find_policy_violations)
        world.round()
        before = world.policy, world.disk
        world.round()
        assert (world.policy, world.disk) == before, "a round after a round changes nothing"
        assert not find_policy_violations(world.policy)
    world.objects.clear()
    world.round()
    assert _plainly(world.policy) == _plainly(world.operators)
    assert world.disk == PolicyRecords()


@settings(max_examples=40, deadline=None)
@given(st.lists(SPECS, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_the_outcome_is_a_function_of_the_objects(specs, rng):
    world = Controller()
    for number, spec in enumerate(specs):
        world.put(f"o{number}", spec)
    world.round()
    wanted = policy_values(world.policy)
    tightest = [row["limitWatts"] for spec in specs for row in spec["budgets"] if row["scope"] == "Cluster"]
    assert wanted.get("budget/cluster") == (min(tightest) if tightest else None)
    named = [spec["objective"] for spec in specs if "objective" in spec]
    assert wanted["objective"].objective == (named[0] if named else "balanced"), "the oldest"

    other = Controller()
    items = list(world.objects.items())
    rng.shuffle(items)
    for name, one in items:  # in another order, one by one
        other.objects[name] = one
        other.round()
    assert policy_values(other.policy) == wanted
