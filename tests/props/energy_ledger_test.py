"""The ledger adds up: windows of a random day with restarts, asked in any way, against a plain list of shares."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eelgrid_controller.energy.ledger import GROUP_KEYS, LedgerPlace, parse_query, resolve_holder, spread_window
from eelgrid_controller.energy.store.ledger_store import LastWindow, open_ledger
from eelgrid_controller.objectives.power.tariffs import WEEK_S, EnergyTariff, StepFunction
from eelgrid_controller.state.measurements import WorkInterval, spread_work
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import (
    AttributionConfidence,
    AttributionMethod,
    EnergyOwner,
    EnergyPart,
    EnergyWindow,
    OwnerKind,
    ResourceRequest,
    WindowDevice,
    WindowShare,
    WorkloadSpec,
)

_SECOND_NS = 10**9
_BEGIN_S = 1_799_971_200  # a midnight
_NODES = {
    "n1": {"a": LedgerPlace("n1", "train", "H100"), "b": LedgerPlace("n1", "train", "H100")},
    "n2": {"c": LedgerPlace("n2", "serve", "A100"), "d": LedgerPlace("n2", "serve", "L40S")},
}
_OWNERS = [
    EnergyOwner(kind=OwnerKind.POD, namespace="ml", pod="p-1", workload="w-1"),
    EnergyOwner(kind=OwnerKind.SLURM, job="7", step="0", user="ann"),
    EnergyOwner(kind=OwnerKind.WORKLOAD, workload="w-2"),
    EnergyOwner(kind=OwnerKind.UNALLOCATED),
    EnergyOwner(kind=OwnerKind.UNATTRIBUTED),
]
_SPECS = {
    "w-1": WorkloadSpec(
        name="chat",
        request=ResourceRequest(gpu_count=1, gpu_milli=1000),
        queue="q1",
        labels={"team": "a", "user": "bob"},
    ),
    "w-2": WorkloadSpec(
        name='odd "name"',
        request=ResourceRequest(gpu_count=1, gpu_milli=1000),
        namespace="ml",
        labels={"team": "b", "cost.center/x": "9"},
    ),
}
_TARIFF = EnergyTariff(
    price=StepFunction((0.0, 3600.0 * 7), (1e-7, 3e-7), WEEK_S),
    carbon=StepFunction((0.0,), (1e-4,), WEEK_S),
    pue=StepFunction((0.0,), (1.5,)),
)
_PARTS = [EnergyPart.BARE_IDLE, EnergyPart.CONTEXT_IDLE, EnergyPart.ACTIVE]


def owner_of(owner):
    return resolve_holder(owner, _SPECS.get(owner.workload))


@st.composite
def windows(draw):
    """Windows of one node over a few days, some of them without length, some of hours."""
    node = draw(st.sampled_from(sorted(_NODES)))
    uuids = sorted(_NODES[node])
    at_s, found = float(_BEGIN_S), []
    for number in range(draw(st.integers(1, 8))):
        length_s = draw(st.one_of(st.just(0.0), st.floats(0.0, 90.0), st.floats(0.0, 100_000.0)))
        shares = draw(
            st.lists(
                st.tuples(
                    st.integers(0, 1),
                    st.integers(0, len(_OWNERS) - 1),
                    st.sampled_from(_PARTS),
                    st.integers(0, 10**12),
                ),
                max_size=6,
            )
        )
        totals = Counter()
        for device, _, _, energy_mj in shares:
            totals[device] += energy_mj
        window = EnergyWindow(
            incarnation=1,
            number=number + 1,
            begin_ns=int(at_s * _SECOND_NS),
            end_ns=int((at_s + length_s) * _SECOND_NS),
            devices=tuple(
                WindowDevice(gpu_uuid=uuid, total_mj=totals[index], uncertainty_mj=totals[index] // 20, uncounted_s=1.5)
                for index, uuid in enumerate(uuids)
            ),
            owners=tuple(_OWNERS),
            shares=tuple(
                WindowShare(
                    device=device,
                    owner=owner,
                    part=part,
                    method=AttributionMethod.EXCLUSIVE,
                    confidence=AttributionConfidence.HIGH,
                    energy_mj=energy_mj,
                )
                for device, owner, part, energy_mj in shares
            ),
        )
        found.append((node, window))
        at_s += length_s
    return found


def asked(**changes):
    return parse_query(
        **{
            "begin_ns": _BEGIN_S * _SECOND_NS,
            "end_ns": (_BEGIN_S + 30 * 86_400) * _SECOND_NS,
            "group_by": (),
            "filters": {},
            "rows_most": 10_000,
        }
        | changes
    )


def kept(folder, found, *, restarts=True):
    store = open_ledger(folder)
    for number, (node, window) in enumerate(found):
        made = spread_window(window, _NODES[node], owner_of, _TARIFF)
        newest = LastWindow(node, window.incarnation, window.number, window.end_ns / 1e9)
        store.add(made.entries, made.measured, [newest], now_s=_BEGIN_S)
        if restarts and number % 3 == 2:
            store.close()
            store = open_ledger(folder)
    return store


def naive_value(name, node, window, share):
    """What a share is filed under, said plainly."""
    place = _NODES[node][window.devices[share.device].gpu_uuid]
    holder = owner_of(window.owners[share.owner])
    if name.startswith("label:"):
        return dict(holder.labels).get(name[6:], "")
    return {"node": place.node_name, "pool": place.pool, "gpu_model": place.gpu_model, **holder._asdict()}[name]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(windows(), min_size=1, max_size=2),
    st.lists(st.sampled_from([*GROUP_KEYS[:-2], "label:team"]), max_size=2, unique=True),
    st.sampled_from([{}, {"namespace": "ml"}, {"label:team": "a"}, {"node": "n1"}, {"workload": "none"}]),
    st.integers(1, 4),
)
def test_answers_are_the_sums_of_shares(tmp_path_factory, series, group_by, filters, rows_most):
    found = [one for many in series for one in many]
    store = kept(tmp_path_factory.mktemp("energy"), found)
    answer = store.query(asked(group_by=tuple(group_by), filters=filters, rows_most=rows_most))
    truth, nobody = Counter(), Counter()
    for node, window in found:
        for share in window.shares:
            if any(naive_value(name, node, window, share) != value for name, value in filters.items()):
                continue
            kind = window.owners[share.owner].kind
            if kind in (OwnerKind.UNALLOCATED, OwnerKind.UNATTRIBUTED):
                nobody[kind.name.lower()] += share.energy_mj
            else:
                truth[tuple(naive_value(name, node, window, share) for name in group_by)] += share.energy_mj
    assert answer.unallocated.energy_mj == nobody["unallocated"]
    assert answer.unattributed.energy_mj == nobody["unattributed"]
    assert answer.owned.energy_mj == truth.total()
    for group in answer.groups:
        assert group.spent.energy_mj == truth[group.values]
    shown = {group.values for group in answer.groups}
    rest = {values: mj for values, mj in truth.items() if values not in shown and mj}
    assert answer.left_out.energy_mj == sum(rest.values())
    if rest and group_by:
        assert len(shown) == rows_most
        assert max(rest.values()) <= min(group.spent.energy_mj for group in answer.groups)
    if not filters:
        assert answer.total.energy_mj == answer.measured_mj
        assert answer.uncounted_s == pytest.approx(1.5 * 2 * len(found))
    store.close()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(windows(), st.integers(0, 60), st.integers(1, 80))
def test_stretches_of_time_add_up_whether_days_or_hours_are_read(tmp_path_factory, found, begin_h, length_h):
    store = kept(tmp_path_factory.mktemp("energy"), found)
    begin_ns = (_BEGIN_S + begin_h * 3600) * _SECOND_NS
    stretch = {"begin_ns": begin_ns, "end_ns": begin_ns + length_h * 3600 * _SECOND_NS}
    by_days, by_hours = store.query(asked(**stretch)), store.query(asked(**stretch, group_by=("hour",)))
    assert by_days.total.energy_mj == by_hours.total.energy_mj == by_days.measured_mj == by_hours.measured_mj
    assert by_days.total.cost == pytest.approx(by_hours.total.cost)
    assert by_days.total.carbon_g == pytest.approx(by_hours.total.carbon_g)
    hours = [int(group.values[0]) for group in by_hours.groups]
    assert hours == sorted(hours)
    assert all(begin_ns // _SECOND_NS <= hour < stretch["end_ns"] // _SECOND_NS for hour in hours)
    store.close()


def alike(one, other):
    """Two answers to the same question: joules to the millijoule, money but for the order in which it was added."""

    def spent(found):
        return (*found[:3], pytest.approx(found.cost), pytest.approx(found.carbon_g))

    def groups(answer):
        return [(group.values, spent(group.spent), group.done) for group in answer.groups]

    assert [(values, done) for values, _, done in groups(one)] == [(values, done) for values, _, done in groups(other)]
    for mine, theirs in zip(one.groups, other.groups, strict=True):
        assert tuple(mine.spent) == spent(theirs.spent)
    for part in ("left_out", "unallocated", "unattributed"):
        assert tuple(getattr(one, part)) == spent(getattr(other, part))
    for part in ("asked", "left_out_rows", "measured_mj", "uncertainty_mj", "uncounted_s", "revision"):
        assert getattr(one, part) == getattr(other, part)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(windows(), min_size=1, max_size=2),
    st.lists(
        st.tuples(st.lists(st.sampled_from([*GROUP_KEYS, "label:team"]), max_size=3, unique=True), st.integers(1, 5)),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([{}, {"namespace": "ml"}, {"node": "n1"}]),
    st.integers(0, 40),
    st.booleans(),
)
def test_questions_that_are_asked_together_have_the_answers_of_each_alone(
    tmp_path_factory, series, questions, filters, begin_h, with_nobody
):
    store = kept(tmp_path_factory.mktemp("energy"), [one for many in series for one in many])
    work = [WorkInterval("w-1", unit, 3.0, _BEGIN_S + 60.0, _BEGIN_S + 90_000.0) for unit in ("request", "token")]
    work.append(WorkInterval("w-2", "step", 7.0, _BEGIN_S, _BEGIN_S + 50.0, is_whole=False))
    store.add([], [], [], [entry for one in work for entry in spread_work(one, None)], now_s=_BEGIN_S)
    together = [
        asked(
            group_by=tuple(group_by),
            filters=filters,
            rows_most=rows_most,
            with_nobody=with_nobody,
            begin_ns=(_BEGIN_S + begin_h * 3600) * _SECOND_NS,
        )
        for group_by, rows_most in questions
    ]
    for one, answer in zip(together, store.query_all(together), strict=True):
        alike(answer, store.query(one))
        if with_nobody:
            assert (answer.unallocated.energy_mj, answer.unattributed.energy_mj) == (0, 0)
            alone = store.query(replace(one, with_nobody=False))
            assert alone.total[:3] == answer.total[:3]
    store.close()


@settings(max_examples=60, deadline=None)
@given(windows())
def test_money_is_the_price_of_the_time(found):
    for node, window in found:
        made = spread_window(window, _NODES[node], owner_of, _TARIFF)
        begin_s, end_s = window.begin_ns / 1e9, window.end_ns / 1e9
        # Power is even within each hour of the cut; steps of a hundredth of each find the same mean.
        for entry in made.entries:
            low, high = max(begin_s, entry.hour_s), min(end_s, entry.hour_s + 3600)
            steps = [low + (high - low) * (step + 0.5) / 400 for step in range(400)]
            mean = sum(map(_TARIFF.price_at, steps)) / len(steps)
            assert entry.spent.cost == pytest.approx(mean * entry.spent.energy_mj / 1000.0, rel=0.01, abs=1e-12)
            assert entry.spent.carbon_g == pytest.approx(1.5e-4 * entry.spent.energy_mj / 1000.0, abs=1e-9)


def test_a_window_over_an_hour_is_cut_by_time():
    share = WindowShare(
        device=0,
        owner=0,
        part=EnergyPart.ACTIVE,
        method=AttributionMethod.EXCLUSIVE,
        confidence=AttributionConfidence.HIGH,
        energy_mj=1_000_003,
    )
    window = EnergyWindow(
        incarnation=1,
        number=1,
        begin_ns=(_BEGIN_S + 1800) * _SECOND_NS,
        end_ns=(_BEGIN_S + 9000) * _SECOND_NS,
        devices=(WindowDevice(gpu_uuid="a", total_mj=1_000_003),),
        owners=(_OWNERS[0],),
        shares=(share,),
    )
    made = spread_window(window, _NODES["n1"], owner_of, None)
    cut = {(entry.hour_s - _BEGIN_S) // 3600: entry.spent.active_mj for entry in made.entries}
    for hour, part in {0: Fraction(1, 4), 1: Fraction(1, 2), 2: Fraction(1, 4)}.items():
        assert abs(cut[hour] - part * 1_000_003) <= 1
    assert sum(cut.values()) == sum(one.total_mj for one in made.measured) == 1_000_003


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"end_ns": _BEGIN_S * _SECOND_NS}, "end_ns"),
        ({"begin_ns": 0}, "begin_ns"),
        ({"group_by": ("colour",)}, "group_by"),
        ({"group_by": ("label:",)}, "group_by"),
        ({"group_by": ("node", "pool", "user", "queue", "kind")}, "group_by"),
        ({"filters": {"hour": "1"}}, "filters"),
        ({"rows_most": 0}, "rows_most"),
    ],
)
def test_a_question_that_cannot_be_asked_names_its_field(changes, field):
    with pytest.raises(InvalidArgument) as refused:
        asked(**changes)
    assert [broken.field for broken in refused.value.violations] == [field]
