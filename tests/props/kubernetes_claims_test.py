"""Two controllers, late watches, lost answers, deaths, cordons and devices that vanish: no device twice, nobody forgotten."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.claims_sim import Cluster, Side

PROFILES = ("1g.10gb", "1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb", "")


def trouble(api, sides, rng, made):
    """One thing that happens."""
    what = rng.randrange(12)
    names = list(api.pods)
    if what <= 3 and made[0] < 24:
        made[0] += 1
        name = f"p{made[0]}"
        if rng.random() < 0.2:
            for number in range(2):
                api.pod(f"{name}-{number}", rng.choice(PROFILES), group=name, size=2)
        else:
            api.pod(name, rng.choice(PROFILES), is_made=rng.random() < 0.5, cpu=rng.choice(("1", "20")), owner="o")
    elif what == 4:
        api.make_claims()
    elif what == 5 and names:
        api.remove(rng.choice(names))
    elif what == 6:
        name = rng.choice(list(api.nodes))
        api.node(name, gpus=rng.choice((2, 2, 2, 1)), cordoned=rng.random() < 0.3)
    elif what <= 8:
        api.schedule()
    elif what == 9:
        epoch = max((side.epoch or 0 for side in sides), default=0) + 1
        for side in sides:
            side.lead(None)
        rng.choice(sides).lead(epoch)
    elif what == 10:
        side = rng.choice(sides)
        epoch = side.epoch
        side.begin()
        side.lead(None if epoch is None else epoch + 1)
    for side in sides:
        side.at_s += rng.random()
        side.hear(rng.randrange(8))
        side.round()
        while side.under_way and rng.random() < 0.7:
            side.write(rng.randrange(len(side.under_way)), fault=rng.choice((None, None, None, "busy", "lost")))


def reserved(api):
    """Claims that pods run on, of devices that are still published: what may never overlap."""
    return [found for found in api.claims.values() if found["status"].get("reservedFor")]


@pytest.mark.parametrize("seed", range(4))
def test_after_any_trouble_all_that_fit_run_and_no_device_is_held_twice(seed):
    rng = random.Random(seed)
    api = Cluster(nodes=("a", "b", "c"))
    sides = [Side(api, epoch=1), Side(api, epoch=None)]
    made = [0]
    for _ in range(120):
        trouble(api, sides, rng, made)
        # A decision is made on all that was written before: whatever was late, nothing is given twice.
        assert api.overdrawn() == []
    for name in api.nodes:
        api.node(name)
    api.make_claims()
    for epoch, leading in ((one[1], one[2]) for one in api.writes):
        assert epoch == leading
    leader = next((side for side in sides if side.epoch is not None), sides[0])
    if leader.epoch is None:
        leader.lead(100)
    for _ in range(30):
        for side in sides:
            side.play(2)
        api.schedule()
        assert api.overdrawn() == []
    for name, pod in api.pods.items():
        if api.where(name):
            continue
        told = {one.text for one in leader.tells if one.key.name == name}
        alone = pod["metadata"]["annotations"] == {}
        assert not alone or any("not free" in text for text in told), (name, told)
    # Nobody is forgotten: with room enough everybody runs.
    for number in range(12):
        api.node(f"more{number}")
    for _ in range(10):
        for side in sides:
            side.play(2)
        api.schedule()
    waiting = [name for name in api.pods if not api.where(name)]
    whole = [name for name in waiting if "-" not in name or f"{name[:-1]}{1 - int(name[-1])}" in api.pods]
    assert whole == []


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(PROFILES), max_size=20), st.integers(0, 2**32))
def test_all_that_come_at_once_are_placed_as_long_as_there_is_room(profiles, seed):
    rng = random.Random(seed)
    api = Cluster(nodes=("a", "b"))
    side = Side(api, epoch=1)
    for number, profile in enumerate(profiles):
        api.pod(f"p{number}", profile)
    for _ in range(5):
        side.at_s += 1.0
        side.hear()
        side.round()
        while side.under_way:
            side.write(fault=rng.choice((None, "busy", "lost")))
    side.play(20)
    api.schedule()
    assert api.overdrawn() == []
    for number, _ in enumerate(profiles):
        told = [one.text for one in side.tells if one.key.name == f"p{number}"]
        assert api.where(f"p{number}") or any("not free" in text for text in told)
