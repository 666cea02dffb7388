"""The partitioner against its brute-force twin: what was asked or a typed refusal, in the fewest steps, sparing what it must."""

import random
from dataclasses import replace

import pytest
from bench.naive_partitioner import Graph, layouts, maximal
from bench.node_transitions import (
    base_graph,
    check_maximal,
    check_sampled,
    check_whole,
    follow,
    gpu_of,
    judge,
    layout_from,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from eelgrid_agent.enforce.mig.layout import (
    InvalidLayout,
    MigLayout,
    build_layout,
    order_compute_instances,
    read_layout,
    resolve_layout,
)
from eelgrid_agent.enforce.mig.layout_requests import place_instances
from eelgrid_agent.enforce.mig.partitioner import (
    CreateComputeInstance,
    CreateGpuInstance,
    DestroyComputeInstance,
    DestroyGpuInstance,
    SetMigMode,
    TransitionRefused,
    find_conflict,
    plan_steps,
)
from eelgrid_agent.enforce.rules import RefusalRule
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.messages import GpuLayout, WantedInstance

PARTS = load_catalogue().geometries
A100, A30, H100, PRO6000 = (PARTS[key] for key in ("a100-40gb", "a30-24gb", "h100-80gb-sxm", "rtx-pro-6000-blackwell"))
G1, G2, G3, G4, G7 = 19, 14, 9, 5, 0


def refusal(geometry, gpu, layout, **limits):
    with pytest.raises(TransitionRefused) as caught:
        plan_steps(geometry, gpu, layout, **limits)
    return caught.value.rule


def spelled(steps):
    return [step.describe() for step in steps]


def test_the_twin_counts_the_layouts_that_are_known():
    """298 layouts and 19 maximal ones of the plain profiles; 26 and 5 on four slices."""
    _, graph = base_graph()
    assert (len(graph.layouts), len(maximal(graph.layouts))) == (298, 19)
    plain = replace(A30, profiles={key: A30.profiles[key] for key in ("1g", "2g", "4g")})
    assert (len(list(layouts(plain))), len(maximal(layouts(plain)))) == (26, 5)
    assert len(list(layouts(A100))) == 2319


def test_every_maximal_layout_to_every_other():
    tally = check_maximal(seed=1)
    assert (tally.failures, tally.first) == (0, [])
    assert tally.cases > 361


def test_every_layout_to_every_other_sampled():
    tally = check_whole(seed=random.randrange(298), count=6)
    assert (tally.failures, tally.first) == (0, [])
    assert tally.cases > 6 * 298


@pytest.mark.slow
def test_every_layout_to_every_other():
    tally = check_whole(seed=0, count=298)
    assert (tally.failures, tally.first) == (0, [])


@pytest.mark.slow
@pytest.mark.parametrize("part", ["rtx-pro-6000-blackwell", "a30-24gb"])
def test_every_layout_of_four_slices_to_every_other(part):
    """With all media and graphics profiles."""
    graph = Graph(PARTS[part])
    goals = [(layout_from(PARTS[part], graph.full(goal)), graph.number(graph.full(goal))) for goal in graph.layouts]
    for source in graph.layouts[:: max(1, len(graph.layouts) // 200)]:
        gpu, distances = gpu_of(PARTS[part], graph.full(source)), graph.distances(graph.full(source), ())
        for goal, number in goals:
            shortest = distances.get(number)
            nothing = frozenset()
            assert judge(PARTS[part], gpu, goal, busy=nothing, foreign=nothing, shortest=lambda _, n=shortest: n) == ""


def test_every_part_sampled():
    tally = check_sampled(seed=random.randrange(1_000_000), count=200)
    assert (tally.failures, tally.first) == (0, [])


def test_the_check_can_fail():
    """A plan with a step too much, one that touches what is in use, and one that ends elsewhere are found out."""
    geometry, _ = base_graph()
    gpu = gpu_of(geometry, [(G1, 0, (0,)), (G1, 1, (0,))])
    goal, spared, nothing = layout_from(geometry, [(G1, 1, (0,)), (G2, 4, (1,))]), frozenset({8}), frozenset()
    assert judge(geometry, gpu, goal, busy=spared, foreign=nothing, shortest=lambda _: 4) == ""
    assert "4 steps where 3 do" in judge(geometry, gpu, goal, busy=spared, foreign=nothing, shortest=lambda _: 3)
    assert "2 calls would do" in judge(
        geometry, gpu, layout_from(geometry, []), busy=spared, foreign=nothing, shortest=lambda _: 2
    )
    with pytest.raises(AssertionError, match="touches what it may not"):
        follow(geometry, gpu, plan_steps(geometry, gpu, layout_from(geometry, [])), spared)
    assert read_layout(follow(geometry, gpu, plan_steps(geometry, gpu, goal)[:-1])) != goal


def test_what_stands_where_it_is_wanted_costs_nothing_and_the_rest_is_destroyed_first_largest_first():
    gpu = gpu_of(A100, [(G1, 0, (0,)), (G2, 2, (1,)), (G3, 4, (2,))])
    goal = layout_from(A100, [(G4, 0, (3,)), (G2, 4, (1,)), (G1, 6, (0,))])
    assert spelled(plan_steps(A100, gpu, goal)) == [
        "destroy compute instance 0 of GPU instance 2",
        "destroy GPU instance 2",
        "destroy compute instance 0 of GPU instance 4",
        "destroy GPU instance 4",
        "destroy compute instance 0 of GPU instance 7",
        "destroy GPU instance 7",
        "create GPU instance of profile 5 at 0",
        "create compute instance of profile 3 in the GPU instance at 0",
        "create GPU instance of profile 14 at 4",
        "create compute instance of profile 1 in the GPU instance at 4",
        "create GPU instance of profile 19 at 6",
        "create compute instance of profile 0 in the GPU instance at 6",
    ]
    assert plan_steps(A100, gpu, read_layout(gpu)) == ()


def test_only_compute_instances_change_where_only_they_differ():
    gpu = gpu_of(A100, [(G4, 0, (1, 0, 0))])
    goal = layout_from(A100, [(G4, 0, (1, 1))])
    assert plan_steps(A100, gpu, goal, busy=frozenset()) == (
        DestroyComputeInstance(instance_id=1, compute_id=2),
        DestroyComputeInstance(instance_id=1, compute_id=1),
        CreateComputeInstance(start=0, profile_id=1),
    )
    assert refusal(A100, gpu, goal, busy={1}) is RefusalRule.BUSY
    again = plan_steps(A100, gpu, goal, remake={1})
    assert len(again) == 5


def test_the_same_span_with_another_profile_is_made_again():
    gpu = gpu_of(A100, [(G1, 0, (0,))])
    goal = layout_from(A100, [(20, 0, (0,))])
    assert plan_steps(A100, gpu, goal)[1:3] == (
        DestroyGpuInstance(instance_id=7),
        CreateGpuInstance(profile_id=20, start=0),
    )


def test_a_foreign_instance_is_subtracted_and_one_in_the_way_is_named():
    gpu = gpu_of(A100, [(G3, 4, (2,))])
    assert len(plan_steps(A100, gpu, layout_from(A100, [(G4, 0, (3,))]), foreign={2})) == 2
    assert len(plan_steps(A100, gpu, layout_from(A100, [(G3, 4, (2,)), (G1, 0, (0,))]), foreign={2})) == 2
    assert refusal(A100, gpu, layout_from(A100, [(G7, 0, (4,))]), foreign={2}) is RefusalRule.FOREIGN
    assert refusal(A100, gpu, layout_from(A100, [(G2, 4, (1,))]), foreign={2}) is RefusalRule.FOREIGN
    assert refusal(A100, gpu, layout_from(A100, [(G3, 4, (1,))]), foreign={2}) is RefusalRule.FOREIGN
    assert refusal(A100, gpu, MigLayout(mig_enabled=False), foreign={2}) is RefusalRule.FOREIGN
    # A media instance is there once only, whoever made it.
    stranger = gpu_of(A100, [(20, 6, (0,))])
    assert refusal(A100, stranger, layout_from(A100, [(20, 0, (0,))]), foreign={13}) is RefusalRule.FOREIGN


def test_the_mode_changes_only_on_an_empty_device_and_where_it_may():
    off = gpu_of(H100, [], mig_enabled=False)
    goal = layout_from(H100, [(G7, 0, (4,))])
    assert plan_steps(H100, off, goal)[0] == SetMigMode(enabled=True)
    assert plan_steps(H100, gpu_of(H100, [(G7, 0, (4,))]), MigLayout(mig_enabled=False))[-1] == SetMigMode(
        enabled=False
    )
    assert refusal(H100, off, goal, mode_changes=False) is RefusalRule.MODE
    assert refusal(H100, off, goal, clients=True) is RefusalRule.BUSY
    assert refusal(H100, replace(off, mig_capable=False), goal) is RefusalRule.MODE
    assert refusal(H100, replace(off, lost=True), goal) is RefusalRule.LOST
    assert refusal(H100, gpu_of(H100, [(G7, 0, (4,))]), MigLayout(mig_enabled=False), busy={0}) is RefusalRule.BUSY
    assert refusal(H100, off, MigLayout(mig_enabled=False, parts=goal.parts)) is RefusalRule.GEOMETRY


def test_nothing_is_placed_while_a_mode_is_pending_and_the_pending_one_can_be_taken_back():
    waiting = replace(gpu_of(A100, [], mig_enabled=False), mig_pending=True)
    assert refusal(A100, waiting, layout_from(A100, [(G7, 0, (4,))])) is RefusalRule.PENDING
    assert plan_steps(A100, waiting, MigLayout(mig_enabled=False)) == (SetMigMode(enabled=False),)
    leaving = replace(gpu_of(A100, []), mig_pending=True)
    assert plan_steps(A100, leaving, layout_from(A100, [(G7, 0, (4,))]))[0] == SetMigMode(enabled=True)
    assert (
        refusal(A100, replace(gpu_of(A100, [(G1, 0, (0,))]), mig_pending=True), read_layout(leaving))
        is RefusalRule.PENDING
    )


def test_profiles_that_the_part_lacks_can_be_removed_and_not_made():
    strange = replace(gpu_of(A100, [(G1, 0, (0,))]).gpu_instances[0], profile_id=77)
    gpu = replace(gpu_of(A100, []), gpu_instances=(strange,))
    assert len(plan_steps(A100, gpu, MigLayout(mig_enabled=True))) == 2
    assert plan_steps(A100, gpu, read_layout(gpu)) == ()
    assert refusal(A100, gpu_of(A100, []), read_layout(gpu)) is RefusalRule.GEOMETRY


@pytest.mark.parametrize(
    ("names", "places"),
    [
        (["3g"], [(G3, 4)]),
        (["4g"], [(G4, 0)]),
        (["3g", "4g"], [(G4, 0), (G3, 4)]),
        (["2g"], [(G2, 4)]),
        (["1g"], [(G1, 6)]),
        (["3g", "2g", "1g", "1g"], [(G2, 0), (G1, 2), (G1, 3), (G3, 4)]),
        (["1g", "1g", "2g", "3g"], [(G2, 0), (G1, 2), (G1, 3), (G3, 4)]),
        (["1g"] * 7, [(G1, start) for start in range(7)]),
    ],
)
def test_f12_counts_are_placed_so_that_nothing_is_stranded_three_at_four_and_the_lower_half_kept(names, places):
    shapes = [(A100.profiles[name].id, (A100.profiles[name].whole.id,)) for name in names]
    layout = place_instances(A100, gpu_of(A100, []), shapes)
    assert [part.place for part in layout.parts] == places


def test_counts_keep_what_stands():
    gpu = gpu_of(A100, [(G1, 0, (0,)), (G3, 0 + 4, (2,))])
    layout = place_instances(A100, gpu, [(G1, (0,)), (G1, (0,)), (G3, (2,))])
    assert {(G1, 0), (G3, 4)} < {part.place for part in layout.parts}
    with pytest.raises(TransitionRefused):
        place_instances(A100, gpu, [(G4, (3,)), (G3, (2,))], busy={7})
    with pytest.raises(InvalidLayout):
        place_instances(A100, gpu, [(G4, (3,)), (G4, (3,))])


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_whatever_is_asked_for_by_counts_stands_where_it_can(data):
    """Any multiset that fits somewhere is placed, on every part, with as few steps as any other placement of it."""
    geometry = data.draw(st.sampled_from(list(PARTS.values())))
    names = data.draw(st.lists(st.sampled_from(list(geometry.profiles)), min_size=1, max_size=3))
    shapes = [(geometry.profiles[name].id, (geometry.profiles[name].whole.id,)) for name in names]
    try:
        layout = place_instances(geometry, gpu_of(geometry, []), shapes)
    except InvalidLayout:
        assert _by_trying(geometry, shapes) is None
        return
    assert sorted((part.profile_id, part.compute) for part in layout.parts) == sorted(shapes)
    assert find_conflict(geometry, layout.parts) is None
    assert (
        place_instances(geometry, gpu_of(geometry, [(p.profile_id, p.start, p.compute) for p in layout.parts]), shapes)
        == layout
    )


def _by_trying(geometry, shapes, placed=()):
    """Some placement, found without any cleverness."""
    if not shapes:
        return placed if geometry.conflict(placed) is None else None
    profile = geometry.profile_by_id(shapes[0][0])
    for start in profile.starts:
        result = _by_trying(geometry, shapes[1:], (*placed, (profile, start)))
        if result is not None:
            return result
    return None


@pytest.mark.parametrize(
    ("layout", "field"),
    [
        ([WantedInstance(profile="5g", start=0)], "instances[0].profile"),
        ([WantedInstance(profile="3g.20gb", start=2)], "instances[0]"),
        ([WantedInstance(profile="1g", start=0), WantedInstance(profile="2g", start=0)], "instances[1]"),
        ([WantedInstance(profile="1g+me", start=0), WantedInstance(profile="1g+me", start=1)], "instances[1]"),
        ([WantedInstance(profile="3g", start=4, compute_slices=(5,))], "instances[0].compute_slices[0]"),
        ([WantedInstance(profile="3g", start=4, compute_slices=(2, 2))], "instances[0].compute_slices"),
    ],
)
def test_a_layout_that_cannot_stand_names_the_field_and_the_remedy(layout, field):
    with pytest.raises(InvalidLayout) as caught:
        resolve_layout(GpuLayout(gpu_uuid="GPU-0", mig_enabled=True, instances=tuple(layout)), A100)
    assert caught.value.field == field
    assert caught.value.remedy


def test_a_layout_is_asked_for_by_key_or_by_printed_name():
    asked = (
        WantedInstance(profile="3g.20gb", start=4, compute_slices=(1, 2)),
        WantedInstance(profile="MIG 1g.5gb", start=0),
        WantedInstance(profile="2g", start=2),
    )
    layout = resolve_layout(GpuLayout(gpu_uuid="GPU-0", mig_enabled=True, instances=asked), A100)
    assert [(part.place, part.compute) for part in layout.parts] == [((19, 0), (0,)), ((14, 2), (1,)), ((9, 4), (1, 0))]
    with pytest.raises(InvalidLayout, match="mig_enabled"):
        resolve_layout(GpuLayout(gpu_uuid="GPU-0", instances=asked[:1]), A100)


def test_three_two_and_two_slices_of_seven_are_made_in_the_order_in_which_they_fit():
    """Largest first puts the three at 0, and then only one two fits."""
    (part,) = build_layout(True, layout_from(A100, [(G7, 0, (2, 1, 1))]).parts).parts
    assert part.compute == (2, 1, 1)
    assert order_compute_instances(A100, part) == (1, 2, 1)
