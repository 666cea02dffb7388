"""The overview: figures equal those of the other calls, every kind of attention, sums, bounds, and what it looks like."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.cluster import build_core, build_node, build_request, build_spending_limit
from tests.builders.server import run_controller
from tests.waiting import wait_for

from eelgrid_controller.cli import doctor_cluster
from eelgrid_controller.cli.doctor_machine import FindingStatus
from eelgrid_controller.energy.ledger import LedgerAmount, LedgerAnswer, LedgerGroup, LedgerQuery
from eelgrid_controller.server.grpc.overview import IDLE_NS, OverviewInputs, OverviewModel
from eelgrid_controller.server.grpc.overview_service import summarize_ledger
from eelgrid_controller.state import events
from eelgrid_controller.state.cordons import OperatorCordon
from eelgrid_controller.state.telemetry import Telemetry
from eelgrid_protos.messages import (
    ATTENTION_MOST,
    CONSUMERS_MOST,
    ApplyStatus,
    AttentionItem,
    AttentionKind,
    AttentionSeverity,
    BudgetScope,
    BudgetStatus,
    CapacityOverview,
    Column,
    Consumer,
    EnergyPrices,
    GetOverviewRequest,
    GetSummaryRequest,
    ListGpusRequest,
    ListNodesRequest,
    ListPromisesRequest,
    ListPromisesResponse,
    ListWorkloadsRequest,
    NodeEvent,
    NodeEventKind,
    Overview,
    PlanApplied,
    Policy,
    PowerBudget,
    PowerOverview,
    PricePeriod,
    PromiseOverview,
    QueryEnergyRequest,
    Reading,
    SampleBatch,
    ServiceStatus,
    SpendingStatus,
    TodayEnergy,
    WaitingReason,
    WorkloadPhase,
)

BEGIN_NS = 10**18
HOUR_NS = 3600 * 10**9


def readings(sequence, *, gpus=2, time_ns=BEGIN_NS, power_w=50.0, busy=0.9, **others):
    """One tick of a node; others are readings by name, the same for each GPU."""
    columns = {Reading.POWER_W: power_w, Reading.UTILIZATION_RATIO: busy}
    columns |= {Reading[name]: value for name, value in others.items()}
    return SampleBatch(
        sequence=sequence,
        inventory_generation=1,
        time_ns=(time_ns,),
        gpu_columns=tuple(Column(reading=one, values=(value,) * gpus) for one, value in columns.items()),
    )


class Cluster:
    """A core and telemetry at a time that a test sets."""

    def __init__(self, *inventories):
        self.core = build_core(*inventories)
        self.telemetry, self.model = Telemetry(), OverviewModel()
        self.now_ns = BEGIN_NS
        self._sequences = {}
        for inventory in inventories:
            self.telemetry.open_stream(inventory, 1)
            self.read(inventory.node_name)

    @property
    def now_s(self):
        return (self.now_ns - BEGIN_NS) / 1e9

    def read(self, name, **values):
        sequence = self._sequences[name] = self._sequences.get(name, 0) + 1
        gpus = len(self.core.state.nodes[name].inventory.gpus)
        batch = readings(sequence, gpus=gpus, time_ns=self.now_ns, **values)
        self.telemetry.receive_batch(name, batch, now_s=self.now_s)

    def submit(self, key, **changes):
        self.core.submit(build_request(key, **changes), now_ns=self.now_ns)
        self.model.note_workloads([key])

    def overview(self, **inputs):
        inputs = {"promises": ListPromisesResponse()} | inputs
        return self.model.build_overview(
            self.core.state, self.telemetry, OverviewInputs(now_ns=self.now_ns, now_s=self.now_s, **inputs)
        )

    def attention(self, **inputs):
        return {item.kind: item for item in self.overview(**inputs).attention}


def changed_gpu(**changes):
    """A node whose second GPU is different."""
    node = build_node()
    return replace(node, gpus=(node.gpus[0], replace(node.gpus[1], **changes)))


def test_a_healthy_cluster_needs_nothing():
    cluster = Cluster(build_node(), build_node("n2"))
    cluster.submit("w1", namespace="a", user="ada")
    found = cluster.overview()
    assert found.attention == ()
    assert found.attention_total == 0
    assert found.capacity == CapacityOverview(gpus=4, held_milli=1000, free_milli=3000, nodes=2)
    assert found.power == PowerOverview(
        measured_w=200.0, measured_gpus=4, gpus=4, nodes_reporting=2, nodes=2, sample_age_s=0.0
    )
    assert found.consumers == (Consumer(namespace="a", user="ada", workloads=1, held_milli=1000, power_w=50.0),)


@pytest.mark.parametrize(
    ("changes", "kind", "severity"),
    [
        ({"lost": True}, AttentionKind.LOST_GPU, AttentionSeverity.CRITICAL),
        ({"cordon": "too many errors"}, AttentionKind.CORDONED_GPU, AttentionSeverity.WARNING),
        ({"mig_capable": True, "mig_pending": True}, AttentionKind.STUCK_LAYOUT, AttentionSeverity.WARNING),
    ],
)
def test_a_gpu_that_needs_a_person(changes, kind, severity):
    cluster = Cluster(changed_gpu(**changes))
    assert [(item.kind, item.severity, item.subject, item.command) for item in cluster.overview().attention] == [
        (kind, severity, "n1/1", "eelctl describe gpu n1/1")
    ]
    assert ["n1/1" in str(one) for one in doctor_findings(cluster)] == [True], "the doctor agrees"


def doctor_findings(cluster):
    record = cluster.core.state.nodes["n1"]
    nodes = [type("Node", (), {"inventory": record.inventory, "state": record.state, "cordons": ()})()]
    checks = [*doctor_cluster.check_gpus(nodes), doctor_cluster.check_layouts(nodes)]
    return [one for one in checks if one.status is not FindingStatus.OK]


@pytest.mark.parametrize("is_node_lost", [False, True])
def test_of_what_is_lost_the_overview_and_the_doctor_show_nothing_else(is_node_lost):
    changes = {"cordon": "too many errors", "mig_capable": True, "mig_pending": True}
    cluster = Cluster(changed_gpu(lost=not is_node_lost, **changes))
    if is_node_lost:
        cluster.core.state.nodes["n1"].mark_lost(cluster.now_ns)
    kind = AttentionKind.LOST_NODE if is_node_lost else AttentionKind.LOST_GPU
    assert [item.kind for item in cluster.overview().attention] == [kind]
    assert len(doctor_findings(cluster)) == (0 if is_node_lost else 1)


def test_a_cordon_of_an_operator_is_known_with_its_reason_and_gone_when_it_is_lifted():
    cluster = Cluster(build_node(), build_node("n2"))
    record = cluster.core.state.nodes["n1"]
    fan = OperatorCordon(since_ns=BEGIN_NS + 7, reason="fan broken", user="ann")
    assert cluster.overview().attention == ()
    record.set_cordon((), fan)
    found = cluster.overview()
    (item,) = found.attention
    assert (item.kind, item.severity, item.subject) == (AttentionKind.CORDONED_NODE, AttentionSeverity.INFO, "n1")
    assert (item.message, item.since_ns) == ("It takes no new work: cordoned by ann: fan broken.", BEGIN_NS + 7)
    assert (found.capacity.nodes_cordoned, found.capacity.free_milli) == (1, 2000)
    record.set_cordon((), None)
    record.set_cordon((record.inventory.gpus[1].uuid,), fan)
    found = cluster.overview()
    assert [(item.kind, item.subject) for item in found.attention] == [(AttentionKind.CORDONED_GPU, "n1/1")]
    assert (found.capacity.nodes_cordoned, found.capacity.gpus_cordoned, found.capacity.free_milli) == (0, 1, 3000)
    record.set_cordon((record.inventory.gpus[1].uuid,), None)
    assert cluster.overview().attention == ()


def test_a_lost_node_is_worse_with_work_on_it_and_its_power_counts_no_more():
    cluster = Cluster(build_node(), build_node("n2"))
    cluster.submit("w1", gpus=2)
    held = cluster.core.state.workloads["w1"].placements[0].node_name
    for name in ("n1", "n2"):
        cluster.core.state.nodes[name].mark_lost(cluster.now_ns + 5)
    cluster.now_ns += HOUR_NS
    found = cluster.overview()
    assert [(item.kind, item.severity) for item in found.attention] == [
        (AttentionKind.LOST_NODE, AttentionSeverity.CRITICAL),
        (AttentionKind.LOST_NODE, AttentionSeverity.WARNING),
    ]
    assert (found.attention[0].subject, found.attention[0].since_ns) == (held, BEGIN_NS + 5)
    assert (found.capacity.nodes_lost, found.capacity.gpus_unreachable, found.capacity.free_milli) == (2, 4, 0)
    assert found.power.measured_w is None
    assert found.consumers[0].power_w is None


def test_stale_readings_are_those_of_the_doctor():
    cluster = Cluster(build_node(), build_node("n2"))
    cluster.now_ns += 31 * 10**9
    cluster.read("n2")
    (item,) = cluster.overview().attention
    assert (item.kind, item.subject, item.since_ns) == (AttentionKind.STALE_READINGS, "n1", BEGIN_NS)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"EVENT_REASONS_MASK": 64.0}, "The hardware slows it down by heat."),
        ({"ROW_REMAP_FAILED": 1.0}, "A memory row could not be remapped."),
        ({"EVENT_REASONS_MASK": 4.0}, None),
    ],
)
def test_readings_of_a_failing_gpu(values, words):
    cluster = Cluster(build_node(gpus=1))
    cluster.read("n1", **values)
    item = cluster.attention().get(AttentionKind.FAILING_GPU)
    assert (item.message if item else None) == words


def test_a_reported_fault_is_shown_for_an_hour():
    cluster = Cluster(build_node(gpus=1))
    fault = NodeEvent(kind=NodeEventKind.XID, time_ns=BEGIN_NS, gpu_uuid="GPU-n1-0", detail="79: off the bus")
    faults = {("n1", "GPU-n1-0"): (0.0, fault)}
    item = cluster.attention(faults=faults)[AttentionKind.FAILING_GPU]
    assert (item.subject, item.message) == ("n1/0", "Its driver reported xid: 79: off the bus.")
    cluster.now_ns += HOUR_NS + 10**9
    cluster.read("n1")
    assert AttentionKind.FAILING_GPU not in cluster.attention(faults=faults)


def test_held_but_idle_counts_after_five_minutes_and_needs_attention_after_thirty():
    cluster = Cluster(build_node())
    cluster.submit("w1", gpus=2, namespace="a", user="ada", name="sleeper")
    for minutes, idle_gpus, is_shown in ((0, 0, False), (6, 2, False), (31, 2, True)):
        cluster.now_ns = BEGIN_NS + minutes * 60 * 10**9
        cluster.read("n1", busy=0.0)
        found = cluster.overview()
        assert (found.capacity.gpus_idle, found.consumers[0].gpus_idle) == (idle_gpus, idle_gpus)
        kinds = {item.kind: item for item in found.attention}
        assert (AttentionKind.HELD_BUT_IDLE in kinds) is is_shown
    item = kinds[AttentionKind.HELD_BUT_IDLE]
    assert (item.subject, item.message) == ("w1", "sleeper holds 2 GPUs idle for 31 min: n1/0, n1/1.")
    cluster.read("n1", busy=0.5)
    assert cluster.overview().capacity.gpus_idle == 0, "one tick of work ends it"


def test_a_gpu_was_not_idle_for_its_holder_before_it_was_placed():
    cluster = Cluster(build_node())
    cluster.read("n1", busy=0.0)
    cluster.now_ns += 2 * IDLE_NS
    cluster.submit("w1")
    cluster.read("n1", busy=0.0)
    assert cluster.overview().capacity.gpus_idle == 0


def test_what_waits_by_constraint_and_for_how_long():
    cluster = Cluster(build_node(gpus=1))
    for number in range(3):
        cluster.submit(f"w{number}", gpus=1, priority=number)
    cluster.now_ns += 2 * HOUR_NS
    cluster.read("n1")
    found = cluster.overview()
    (reason,) = found.waiting
    assert (reason.reason, reason.workloads, reason.gpu_milli) == ("gpu_count", 2, 2000)
    assert (reason.oldest_since_ns, reason.example_workload_id) == (BEGIN_NS, next(iter(cluster.core.state.pending)))
    (item,) = found.attention
    assert (item.kind, item.severity, item.command) == (
        AttentionKind.LONG_WAIT,
        AttentionSeverity.INFO,
        "eelctl queue --reason gpu_count",
    )


def budget(**changes):
    limit = PowerBudget(scope=BudgetScope.RACK, name="r1", limit_w=1000.0)
    return BudgetStatus(budget=limit, **changes)


@pytest.mark.parametrize(
    ("status", "kind", "severity"),
    [
        (budget(measured_w=1200.0), AttentionKind.BUDGET_OVER, AttentionSeverity.CRITICAL),
        (budget(shortfall_w=10.0), AttentionKind.BUDGET_SHORT, AttentionSeverity.WARNING),
        (budget(claimed_w=980.0), AttentionKind.BUDGET_SHORT, AttentionSeverity.INFO),
        (budget(claimed_w=500.0, measured_w=400.0), None, None),
    ],
)
def test_budgets_as_the_doctor_judges_them(status, kind, severity):
    found = Cluster(build_node()).overview(promises=ListPromisesResponse(budgets=(status,)))
    assert [(item.kind, item.severity) for item in found.attention] == ([] if kind is None else [(kind, severity)])
    (check, *_) = doctor_cluster.check_budgets([status])
    assert (check.status is FindingStatus.OK) is (kind is None)


def test_promises_are_counted_once_and_broken_ones_listed():
    def service(key, phase="settled", **changes):
        return ServiceStatus(workload_id=key, name=key, phase=phase, objective_s=0.2, **changes)

    services = (
        service("kept", live_s=0.1),
        service("late", live_s=0.3),
        service("blind", phase="unsteered", reason="no profile; measure one"),
        service("new"),
    )
    found = Cluster(build_node()).overview(promises=ListPromisesResponse(services=services))
    assert found.promises == PromiseOverview(kept=1, at_risk=1, broken=1, unknown=1)
    assert [(item.kind, item.subject) for item in found.attention] == [
        (AttentionKind.BROKEN_PROMISE, "late"),
        (AttentionKind.UNCONTROLLED_PROMISE, "blind"),
    ]


def test_spending_the_disk_plans_and_the_journal():
    cluster = Cluster(build_node())
    spending = (
        SpendingStatus(begin_ns=1, end_ns=2, limit=build_spending_limit(10.0), spent=40_000.0, over_since_ns=7),
        SpendingStatus(begin_ns=1, end_ns=2, limit=build_spending_limit(10.0, "ml"), spent=33_000.0),
        SpendingStatus(begin_ns=1, end_ns=2, limit=build_spending_limit(10.0, "web"), spent=3.0),
    )
    cluster.telemetry.record_plan_applied("n1", PlanApplied(epoch=1, status=ApplyStatus.FAILED))
    cluster.core.state.apply(
        events.NodeAhead(time_ns=5, node_name="n1", plan_epoch=9, assignments=1, workload_ids=("x",))
    )
    found = cluster.attention(spending=spending, journal_problem="No space.", ledger_problem="No disk.")
    assert {kind: item.subject for kind, item in found.items()} == {
        AttentionKind.AHEAD_OF_JOURNAL: "n1",
        AttentionKind.JOURNAL: "journal",
        AttentionKind.SPENDING_OVER: "namespace research",
        AttentionKind.PLAN_NOT_APPLIED: "n1",
        AttentionKind.LEDGER: "energy ledger",
        AttentionKind.SPENDING_NEAR: "namespace ml",
    }
    assert found[AttentionKind.AHEAD_OF_JOURNAL].command == "eelctl reconcile n1"


def test_lists_are_bounded_and_count_their_rest():
    many = ATTENTION_MOST + 20
    cluster = Cluster(*(build_node(f"n{number}", gpus=1) for number in range(many)))
    for number in range(many):
        cluster.submit(f"w{number}", namespace="a", user=f"u{number}")
    cluster.now_ns += HOUR_NS
    found = cluster.overview()
    assert (len(found.attention), found.attention_total) == (ATTENTION_MOST, many)
    assert (len(found.consumers), found.consumers_total) == (CONSUMERS_MOST, many)
    assert found.consumers_left_out_milli == 20_000
    held = sum(one.held_milli for one in found.consumers) + found.consumers_left_out_milli
    assert held == found.capacity.held_milli == many * 1000


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("submit", "cancel", "read", "lose", "join")),
        st.integers(0, 5),
        st.sampled_from((250, 500, 1000)),
    ),
    max_size=30,
)


@settings(deadline=None)
@given(STEPS)
def test_sums_are_those_of_a_fresh_count_whatever_happened(steps):
    inventories = [build_node(f"n{number}") for number in range(3)]
    cluster = Cluster(*inventories)
    for number, (step, which, milli) in enumerate(steps):
        cluster.now_ns += 10**9
        waited = set(cluster.core.state.pending)
        if step == "submit":
            cluster.submit(f"w{number}", milli=milli, namespace=f"s{which % 2}", user=f"u{which % 3}")
        elif step == "cancel" and (live := [k for k, w in cluster.core.state.workloads.items() if not w.ended_ns]):
            cluster.core.cancel(live[which % len(live)], now_ns=cluster.now_ns)
            cluster.model.note_workloads(cluster.core.state.workloads)
        elif step == "read":
            cluster.read(f"n{which % 3}", power_w=10.0 * which + 0.1, busy=float(which % 2))
        elif step == "lose":
            cluster.core.mark_node_lost(f"n{which % 3}", now_ns=cluster.now_ns)
        elif step == "join":
            cluster.core.register_node(inventories[which % 3], now_ns=cluster.now_ns)
        cluster.model.note_workloads(waited | set(cluster.core.state.pending))
        found = cluster.overview()
        kept, cluster.model = cluster.model, OverviewModel()
        assert found == cluster.overview()
        cluster.model = kept
        assert sum(one.held_milli for one in found.consumers) == found.capacity.held_milli
        assert sum(one.workloads for one in found.consumers) == found.workloads_placed
        assert sum(one.workloads for one in found.waiting) == found.workloads_waiting


def test_the_ledgers_day_with_its_idle_part():
    hour = LedgerGroup(("0",), LedgerAmount(1000, 1000, 2000, cost=8.0, carbon_g=4.0))
    asked = LedgerQuery(begin_s=3600, end_s=7200)
    answer = LedgerAnswer(
        asked=asked,
        groups=(hour,),
        left_out=LedgerAmount(),
        left_out_rows=0,
        unallocated=LedgerAmount(3000, cost=6.0),
        unattributed=LedgerAmount(0, 0, 500, cost=1.0),
        measured_mj=7500,
        uncertainty_mj=0,
        uncounted_s=0.0,
    )
    users = replace(answer, groups=(LedgerGroup(("ml", "ada"), hour.spent),))
    prices = EnergyPrices(currency="EUR", periods=(PricePeriod(begins_minute=0, price_per_kwh=0.2),), pue=1.0)
    today, by_consumer = summarize_ledger(answer, users, Policy(prices=prices), 9 * 10**9)
    assert (today.energy_j, today.unallocated_j, today.held_idle_j, today.idle_j) == (7.5, 3.0, 2.0, 5.0)
    assert (today.cost, today.idle_cost, today.currency, today.carbon_g) == (15.0, 10.0, "EUR", None)
    assert by_consumer == {("ml", "ada"): (4.0, 8.0)}
    assert summarize_ledger(answer, users, Policy(), 1).today.cost is None


async def test_figures_are_those_of_the_other_calls(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        api = rig.operators
        agent = await rig.join(build_node(gpus=4))
        await rig.join(build_node("n2", gpus=4))
        for number in range(8):
            await api.submit_workload(
                build_request(f"w{number}", gpus=2 if number % 2 else 1, namespace=f"s{number % 2}", user="ada")
            )
        await agent.say(readings(1, gpus=4, time_ns=time.time_ns(), power_w=75.0))

        async def read():
            return (await api.get_overview(GetOverviewRequest())).overview

        async def read_measured():
            found = await read()
            return found if found.power.measured_gpus == 4 else None

        found = await wait_for(read_measured)
        summary = (await api.get_summary(GetSummaryRequest())).summary
        gpus = (await api.list_gpus(ListGpusRequest())).gpus
        nodes = (await api.list_nodes(ListNodesRequest())).nodes
        workloads = (await api.list_workloads(ListWorkloadsRequest())).workloads
        promises = await api.list_promises(ListPromisesRequest())
        energy = await api.query_energy(
            QueryEnergyRequest(begin_ns=found.today.begin_ns, end_ns=found.today.end_ns, group_by=("user",))
        )
        assert found.power.measured_w == summary.measured_power_w == sum(node.power_w or 0.0 for node in nodes) == 300.0
        assert found.capacity.gpus == summary.gpus == len(gpus)
        assert found.capacity.held_milli == sum(gpu.allocated_milli for gpu in gpus) == summary.allocated_gpu_milli
        assert found.capacity.free_milli == sum(1000 - gpu.allocated_milli for gpu in gpus)
        assert (found.workloads_placed, found.workloads_waiting) == (summary.placed, summary.pending)
        waiting = [one for one in workloads if one.phase is WorkloadPhase.PENDING]
        assert [(one.reason, one.workloads) for one in found.waiting] == [("gpu_count", len(waiting))]
        assert found.power.budgets == promises.budgets
        assert found.today.energy_j == energy.measured_mj / 1000.0
        measured = sum(one.power_w or 0.0 for one in workloads)
        assert sum(one.power_w or 0.0 for one in found.consumers) == pytest.approx(measured)
        assert [item.subject for item in found.attention] == ["n2"]


async def test_callers_within_a_second_get_the_same_answer(tmp_path: Path) -> None:
    async with run_controller(tmp_path) as rig:
        await rig.join(build_node())
        first, second = [(await rig.operators.get_overview(GetOverviewRequest())).overview for _ in range(2)]
        assert first.time_ns == second.time_ns


def test_a_failure_in_readings_that_come_seldom_stays_in_the_list() -> None:
    core, telemetry = build_core(build_node()), Telemetry()
    telemetry.open_stream(build_node(), 1)
    model = OverviewModel()

    def subjects(sequence: int, second: int, **others: float) -> list[str]:
        now_ns = BEGIN_NS + second * 10**9
        telemetry.receive_batch("n1", readings(sequence, time_ns=now_ns, **others), now_s=float(second))
        inputs = OverviewInputs(now_ns=now_ns, now_s=float(second), promises=ListPromisesResponse())
        found = model.build_overview(core.state, telemetry, inputs)
        return [item.subject for item in found.attention if item.kind is AttentionKind.FAILING_GPU]

    assert subjects(1, 0) == []
    assert subjects(2, 5, RECOVERY_ACTION=1.0) == ["n1/0", "n1/1"]
    for sequence in range(3, 20):
        assert subjects(sequence, 5 * sequence) == ["n1/0", "n1/1"]
    assert subjects(20, 100, RECOVERY_ACTION=0.0) == []
    assert subjects(21, 105) == []


NOW_NS = 1_800_000_000_000_000_000
SHOWN = Overview(
    time_ns=NOW_NS,
    power=PowerOverview(
        measured_w=8200.0, measured_gpus=15, gpus=16, nodes_reporting=2, nodes=2, budget_w=10_000.0, claimed_w=9900.0
    ),
    today=TodayEnergy(
        begin_ns=1, end_ns=2, energy_j=7.2e8, idle_j=1.8e8, cost=40.0, idle_cost=10.0, currency="EUR", carbon_g=5e4
    ),
    capacity=CapacityOverview(gpus=16, held_milli=12_500, free_milli=2500, gpus_lost=1, gpus_idle=2, nodes=2),
    waiting=(
        WaitingReason(
            reason="gpu_count",
            workloads=3,
            gpu_milli=12_000,
            oldest_since_ns=NOW_NS - HOUR_NS,
            example_workload_id="w7",
            remedy="wait for work to end there, or add nodes; `eelctl explain w7` tries what would help",
        ),
    ),
    promises=PromiseOverview(kept=4, broken=1),
    attention=(
        AttentionItem(
            severity=AttentionSeverity.CRITICAL,
            kind=AttentionKind.LOST_GPU,
            subject="n1/3",
            message="It does not respond; 1 workload held it, and this sentence is far too long for eighty columns.",
            since_ns=NOW_NS - HOUR_NS,
            command="eelctl describe gpu n1/3",
        ),
    ),
    attention_total=3,
    consumers=(
        Consumer(namespace="ml", user="ada", workloads=4, held_milli=12_500, power_w=8000.0, energy_j=3.6e8, cost=20.0),
    ),
    consumers_total=1,
    workloads_placed=4,
    workloads_waiting=3,
)


def test_the_screen_fits_eighty_columns_and_names_commands(eelctl, fake):
    fake.overview = SHOWN
    lines = eelctl("overview").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for part in (
        "POWER      [####################----] 8,200 W of 10.0 kW, 82 %",
        "TODAY      200.0 kWh, 40.00 EUR, 50 kg CO2",
        "idle 50.00 kWh (25 %), 10.00 EUR",
        "GPUS       16: 12.5 held, 2.5 free, 2 held but idle, 1 lost",
        "PROMISES   4 kept, 1 broken",
        "NEEDS ATTENTION (3)",
        "  critical  n1/3: It does not respond",
        "            eelctl describe gpu n1/3",
        "and 2 more: eelctl overview -o wide",
    ):
        assert part in text


def test_json_is_the_message(eelctl, fake):
    fake.overview = SHOWN
    found = json.loads(eelctl("overview", "-o", "json").stdout)
    assert found["attention"][0]["kind"] == "lost_gpu"
    assert found["attention_total"] == 3
