"""Remedies cure: each way that is advised places the work, carried out on a copy of the core."""

from dataclasses import replace
from functools import cache

from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from tests.builders.cluster import build_core, build_node, build_request

from eelgrid_controller.core.core import Core
from eelgrid_controller.placement.remedies import (
    AllowModels,
    AskForLess,
    EndWorkloads,
    EnforcePools,
    OpenNodes,
    PendingCase,
    ProvisionNodes,
    RaiseBudgets,
    SwitchMigOff,
    list_remedies,
)
from eelgrid_controller.state.engine_reports import ExternalUsage
from eelgrid_controller.state.policy import make_budget_key
from eelgrid_protos import catalogue
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import (
    BudgetScope,
    EnforcementMode,
    PoolMode,
    PowerBudget,
    SubmitWorkloadRequest,
    Weights,
    WorkloadPhase,
)

MODELS = ("G2", "A10", "V100M16")
KEY = "wanted"
# Of a GPU that says which limits it takes.
LIMITS = {"power_limit_min_w": 40.0, "power_limit_default_w": 150.0, "power_limit_max_w": 150.0}
known = cache(catalogue.load_catalogue)
AMOUNTS = {
    "cpu": st.sampled_from([0.5, 1, 2, 3, 4, 7, 16]),
    "memory_gib": st.sampled_from([0, 1, 3, 8, 30]),
    "priority": st.integers(0, 2),
}


@st.composite
def nodes(draw, name):
    node = build_node(
        name,
        gpus=draw(st.integers(0, 4)),
        model=draw(st.sampled_from(MODELS)),
        cpu=draw(st.sampled_from([4, 8, 16])),
        memory_gib=draw(st.sampled_from([4, 8, 32])),
        topology=(draw(st.sampled_from(["r1", "r2"])),),
    )
    cut = draw(st.sampled_from([0, 0, 0, 1, 2]))
    limits = LIMITS if draw(st.booleans()) else {}
    gpus = tuple(replace(gpu, mig_enabled=gpu.index < cut, **limits) for gpu in node.gpus)
    return replace(node, gpus=gpus, sets_limits=draw(st.booleans()))


@st.composite
def requests(draw, key, *, replicas=2, models=False):
    gpus = draw(st.sampled_from([0, 1, 1, 1, 2, 3]))
    milli = draw(st.sampled_from([100, 250, 300, 500, 700, 1000, 1000])) if gpus == 1 else None
    allowed = draw(st.sampled_from([(), *((model,) for model in MODELS), MODELS[:2]])) if models and gpus else ()
    amounts = {name: draw(values) for name, values in AMOUNTS.items()}
    return build_request(
        gpus=gpus, milli=milli, models=allowed, key=key, replicas=draw(st.integers(1, replicas)), **amounts
    )


@st.composite
def policies(draw, policy):
    """Budgets of the cluster, of racks and of nodes; often none.

    With budgets the watts alone decide where work goes: the search for a gang's places within budgets follows the
    order of costs and is not exhaustive, and what is submitted again would otherwise change what the fleet expects,
    and with it that order.
    """
    budgets = []
    if draw(st.booleans()):
        policy = replace(policy, objective="custom", weights=Weights(power=1.0, fragmentation_w=0.0, stranding_w=0.0))
        for scope, name in ((BudgetScope.CLUSTER, ""), (BudgetScope.RACK, "r1"), (BudgetScope.NODE, "n0")):
            if draw(st.booleans()):
                budgets.append(PowerBudget(scope=scope, name=name, limit_w=float(draw(st.integers(1, 20)) * 100)))
    return replace(policy, budgets=tuple(budgets))


@st.composite
def waiting_cores(draw):
    """A core with work that runs, and one workload that waits."""
    core = build_core(*(draw(nodes(f"n{number}")) for number in range(draw(st.integers(1, 4)))))
    names = list(core.state.nodes)
    for name in names:
        if draw(st.integers(0, 4)) == 0:
            others = ExternalUsage(
                cpu_milli=draw(st.integers(0, 4)) * 1000,
                gpu_count=draw(st.integers(0, 2)),
                traits=draw(st.sampled_from([(), ("fast",)])),
                closed=draw(st.sampled_from(["", "", "cordoned"])),
            )
            core.update_external_usage(name, others, now_ns=2)
    for number in range(draw(st.integers(0, 8))):
        request = draw(requests(f"w{number}"))
        try:
            step = core.submit(request, now_ns=3)
        except InvalidArgument:
            continue
        if not step.result.placements:
            core.cancel(request.workload_id, now_ns=3)
    if draw(st.integers(0, 4)) == 0:
        core.mark_node_lost(draw(st.sampled_from(names)), now_ns=4)
    core.update_policy(draw(policies(core.state.policy)), now_ns=5)
    for number in range(12):
        wanted = draw(requests(f"r{number}", replicas=5, models=True))
        traits = ("fast",) if draw(st.integers(0, 11)) == 0 else ()
        wanted = replace(wanted, spec=replace(wanted.spec, required_traits=traits))
        try:
            waits = not core.submit(replace(wanted, dry_run=True), now_ns=6).result.placements
        except InvalidArgument:
            continue
        # What finds its place runs on; the first that waits is looked at.
        core.submit(replace(wanted, workload_id=KEY) if waits else wanted, now_ns=6)
        if waits:
            return core
    assume(False)
    return core


def submit_instead(core, spec):
    core.cancel(KEY, now_ns=8)
    core.submit(SubmitWorkloadRequest(workload_id="instead", spec=spec), now_ns=8)
    return "instead"


def raise_budgets(policy, limits_w):
    limits = dict(limits_w)
    keyed = [(make_budget_key(budget.scope, budget.name), budget) for budget in policy.budgets]
    assert limits.keys() <= {key for key, _ in keyed}
    budgets = tuple(replace(budget, limit_w=limits.get(key, budget.limit_w)) for key, budget in keyed)
    return replace(policy, budgets=budgets)


def carry_out(core, step):
    """Takes one step; returns the id of the workload that should have its place by then."""
    spec = core.state.workloads[KEY].spec
    match step:
        case EndWorkloads():
            for key in step.workload_ids:
                core.cancel(key, now_ns=8)
        case AskForLess():
            assert not any(step.spec.request.violations())
            return submit_instead(core, step.spec)
        case AllowModels():
            models = (*spec.request.gpu_models, *step.models)
            return submit_instead(core, replace(spec, request=replace(spec.request, gpu_models=models)))
        case SwitchMigOff():
            for name, indexes in step.gpus:
                inventory = core.state.nodes[name].inventory
                gpus = tuple(
                    replace(gpu, mig_enabled=gpu.mig_enabled and gpu.index not in indexes) for gpu in inventory.gpus
                )
                core.register_node(replace(inventory, gpus=gpus), now_ns=8)
        case OpenNodes():
            for name in step.node_names:
                record = core.state.nodes[name]
                if step.obstacle == "lost":
                    core.register_node(record.inventory, now_ns=8)
                else:
                    core.update_external_usage(name, replace(record.others, closed=""), now_ns=8)
        case EnforcePools():
            modes = tuple(PoolMode(pool=pool, mode=EnforcementMode.ENFORCE) for pool in step.pools)
            core.update_policy(replace(core.state.policy, pools=modes), now_ns=8)
        case RaiseBudgets():
            core.update_policy(raise_budgets(core.state.policy, step.limits_w), now_ns=8)
        case ProvisionNodes():
            request = step.request
            for number in range(step.count):
                model = request.gpu_models[0] if request.gpu_models else "G2"
                added = build_node(f"new-{number}", gpus=request.gpu_count, model=model)
                added = replace(added, cpu_milli=request.cpu_milli, memory_bytes=request.memory_bytes)
                core.register_node(added, now_ns=8)
    return KEY


@settings(max_examples=150, deadline=None)
@given(core=waiting_cores())
def test_each_remedy_places_the_work(core):
    spec = core.state.workloads[KEY].spec
    placer = core._chooser
    decision = placer.decide_placement(spec, workload_id=KEY)
    assert core.explain_workload(KEY).remedy.endswith(".")
    for remedy in list_remedies(PendingCase(KEY, spec, core.state, placer), decision):
        trial = Core(core.state.copy(), known())
        keys = {carry_out(trial, step) for step in remedy} - {KEY} or {KEY}
        assert {trial.workload(key).phase for key in keys} == {WorkloadPhase.PLACED}, remedy


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0.3, 0.6, 0.9, 1.1])), min_size=1, max_size=3),
    st.sampled_from([None, 0.5, 0.8]),
    st.lists(st.integers(1, 4), min_size=1, max_size=6),
)
def test_the_pools_to_enforce_that_are_named_place_the_work_where_it_is_said(sizes, above, wanted):
    """Whole GPUs under budgets of nodes, and of the cluster, that agents would keep."""
    plain = [build_node(f"n{number}", gpus=gpus, cpu=64, memory_gib=256) for number, (gpus, _) in enumerate(sizes)]
    core = build_core(
        *(replace(one, sets_limits=True, gpus=tuple(replace(gpu, **LIMITS) for gpu in one.gpus)) for one in plain)
    )
    budgets = [
        PowerBudget(scope=BudgetScope.NODE, name=f"n{number}", limit_w=150.0 * gpus * share)
        for number, (gpus, share) in enumerate(sizes)
    ]
    if above is not None:
        whole_w = 150.0 * sum(gpus for gpus, _ in sizes)
        budgets.append(PowerBudget(scope=BudgetScope.CLUSTER, limit_w=above * whole_w))
    weights = Weights(power=1.0, fragmentation_w=0.0, stranding_w=0.0)
    policy = replace(core.state.policy, objective="custom", weights=weights, budgets=tuple(budgets))
    core.update_policy(policy, now_ns=2)
    for number, gpus in enumerate(wanted):
        key = f"w{number}"
        try:
            waits = core.submit(build_request(gpus=gpus, key=key), now_ns=3).result
        except InvalidArgument:
            continue
        if waits.phase is not WorkloadPhase.PENDING:
            continue
        placer = core._chooser
        decision = placer.decide_placement(waits.spec, workload_id=key)
        ways = list_remedies(PendingCase(key, waits.spec, core.state, placer), decision)
        enforced = [way[0] for way in ways if isinstance(way[0], EnforcePools)]
        trial = Core(core.state.copy(), known())
        modes = (PoolMode(pool="default", mode=EnforcementMode.ENFORCE),)
        trial.update_policy(replace(trial.state.policy, pools=modes), now_ns=4)
        places = [place.node_name for place in trial.workload(key).placements]
        assert not enforced or places
        event(f"named {bool(enforced)}, placed {bool(places)}")
        if enforced:
            assert places == list(enforced[0].node_names)
        core.cancel(key, now_ns=4)


@settings(max_examples=100, deadline=None)
@given(core=waiting_cores())
def test_nothing_is_ended_in_vain(core):
    """On one node no workload of those named could stay; and every amount to free is one that is missing."""
    spec = core.state.workloads[KEY].spec
    placer = core._chooser
    decision = placer.decide_placement(spec, workload_id=KEY)
    for remedy in list_remedies(PendingCase(KEY, spec, core.state, placer), decision):
        for step in remedy:
            if not isinstance(step, EndWorkloads):
                continue
            assert step.workload_ids
            for shortage in step.shortages:
                assert shortage.gpus or shortage.cpu_milli > 0 or shortage.memory_bytes > 0
                assert all(0 < milli <= 1000 for _, milli in shortage.gpus)
            if spec.replicas > 1 or len(remedy) > 1:
                continue
            for kept in step.workload_ids:
                trial = Core(core.state.copy(), known())
                for key in step.workload_ids:
                    if key != kept:
                        trial.cancel(key, now_ns=8)
                on_node = {at.node_name for at in trial.workload(KEY).placements}
                assert not on_node.intersection(one.node_name for one in step.shortages), (kept, remedy)
