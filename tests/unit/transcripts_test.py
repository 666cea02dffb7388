"""What real drivers were seen to do, replayed on the simulated device: ids, places, and orders that fail.

The vectors stand here, so that they run anywhere; where the published file of
transcripts is at hand (EELGRID_DATA), it must say the same and replay too.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eelgrid_agent.simulation.mig import (
    DriverRefusal,
    DriverRefused,
    SimMig,
    arrange_compute_instances,
    choose_driver_placement,
)
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.catalogue.products import GiProfile, MigGeometry, gi_id

DATA = Path(os.environ.get("EELGRID_DATA", Path(__file__).parents[2].parent / "shared" / "data"))
Seen = tuple[tuple[int | str, int, int, int], ...]
# Part; profiles in the order in which they were made, without a place; (profile, id, start, size) as seen.
ORDERS: tuple[tuple[str, tuple[int, ...], Seen], ...] = (
    ("a100-40gb", (9, 19, 14, 19), ((9, 2, 4, 4), (19, 7, 0, 1), (14, 4, 2, 2), (19, 8, 1, 1))),
    (
        "a100-40gb", (14, 19, 19, 19, 19, 19),
        ((14, 5, 4, 2), (19, 13, 6, 1), (19, 7, 0, 1), (19, 8, 1, 1), (19, 9, 2, 1), (19, 10, 3, 1)),
    ),
    ("a100-40gb", (19, 19, 14, 9), ((19, 13, 6, 1), (19, 11, 4, 1), (14, 3, 0, 2))),
    ("a100-40gb", (9, 9), ((9, 2, 4, 4), (9, 1, 0, 4))),
    ("a100-80gb", (14, 14, 14, 20), ((14, 5, 4, 2), (14, 3, 0, 2), (14, 4, 2, 2), (20, 13, 6, 1))),
    ("h100-96gb", (15, 15, 15), ((15, 5, 4, 2), (15, 3, 0, 2), (15, 4, 2, 2))),
    ("h100-94gb-nvl", (9, 15, 19), ((9, 1, 0, 4), (15, 5, 4, 2), (19, 13, 6, 1))),
    ("rtx-pro-6000-blackwell", (14,), ((14, 3, 0, 1),)),
)  # fmt: skip
# Layouts that were seen, in no known order.
LISTINGS: tuple[tuple[str, Seen], ...] = (
    ("a30-24gb", (("1g", 3, 0, 1), ("1g", 4, 1, 1), ("2g", 2, 2, 2))),
    ("a100-40gb", ((5, 1, 0, 4), (9, 2, 4, 4))),
    ("rtx-pro-6000-blackwell", (("1g", 3, 0, 1),)),
)
PARTS = sorted(load_catalogue().geometries)


def make_mig(part: str, branch: int = 580) -> SimMig:
    mig = SimMig(load_catalogue().geometries[part], UUID(int=1), branch=branch)
    mig.apply_layout(())
    return mig


def create(mig: SimMig, profile_id: int, start: int | None = None) -> tuple[int, int, int, int] | DriverRefusal:
    try:
        made = mig.create_instance(profile_id, start)
    except DriverRefused as refused:
        return refused.why
    return made.profile.id, made.id, made.start, made.profile.size


def replay_order(part: str, order: tuple[int, ...], seen: Seen) -> None:
    mig = make_mig(part)
    assert [create(mig, profile_id) for profile_id in order[: len(seen)]] == [tuple(row) for row in seen]
    for profile_id in order[len(seen) :]:
        assert create(mig, profile_id) is DriverRefusal.NO_ROOM


def replay_listing(part: str, seen: Seen) -> None:
    mig = make_mig(part)
    for name, number, start, size in seen:
        profile = mig.geometry.profiles[name] if isinstance(name, str) else mig.get_profile(name)
        assert create(mig, profile.id, start) == (profile.id, number, start, size)


@pytest.mark.parametrize(("part", "order", "seen"), ORDERS, ids=[f"{part}-{order}" for part, order, _ in ORDERS])
def test_an_order_of_creation_ends_as_it_was_seen(part: str, order: tuple[int, ...], seen: Seen) -> None:
    replay_order(part, order, seen)


@pytest.mark.parametrize(("part", "seen"), LISTINGS)
def test_a_listing_has_the_ids_that_were_seen(part: str, seen: Seen) -> None:
    replay_listing(part, seen)


def test_the_order_that_fails_works_the_other_way_round() -> None:
    mig = make_mig("a100-40gb")
    assert all(isinstance(create(mig, profile_id), tuple) for profile_id in (9, 14, 19, 19))


@pytest.fixture
def vectors() -> list[dict]:
    path = DATA / "mig" / "transcripts.json"
    if not path.exists():
        pytest.skip(f"{path} is not here; set EELGRID_DATA to the folder of published data")
    return json.loads(path.read_text("utf-8"))["vectors"]


def test_the_published_transcripts_replay(vectors: list[dict]) -> None:
    for vector in vectors:
        seen = tuple(map(tuple, vector["seen"]))
        if "ops" not in vector:
            replay_listing(vector["gpu"], seen)
            continue
        replay_order(vector["gpu"], tuple(vector["ops"]), seen)
        if "then" in vector:
            assert vector["ops"][len(seen) :] == [vector["then"]["profile"]]
            assert vector["then"]["error"] == "NVML_ERROR_INSUFFICIENT_RESOURCES"


def test_the_vectors_here_are_the_published_ones(vectors: list[dict]) -> None:
    orders = {(v["gpu"], tuple(v["ops"]), tuple(map(tuple, v["seen"]))) for v in vectors if "ops" in v}
    listings = {(v["gpu"], tuple(map(tuple, v["seen"]))) for v in vectors if "ops" not in v}
    first = ORDERS[-1]
    assert orders | {first} == set(ORDERS)
    assert listings == set(LISTINGS)


# The rules behind


def reference_free(geometry: MigGeometry, held: list[tuple[GiProfile, int]], profile: GiProfile) -> list[int]:
    """Where a profile still fits, by drawing every slice."""
    free = []
    for start in profile.starts:
        cells = [0] * geometry.memory_slices
        for other, place in [*held, (profile, start)]:
            for cell in range(place, place + other.size):
                cells[cell] += 1
        compute = sum(other.compute_slices for other, _ in held) + profile.compute_slices
        alike = sum(other.id == profile.id for other, _ in held) + 1
        if max(cells) == 1 and compute <= geometry.compute_slices and alike <= profile.most:
            free.append(start)
    return free


MOVES = st.lists(st.tuples(st.booleans(), st.integers(0, 11), st.integers(-1, 8)), max_size=25)


@given(part=st.sampled_from(PARTS), moves=MOVES)
def test_what_fits_is_what_a_drawing_shows(part: str, moves: list[tuple[bool, int, int]]) -> None:
    mig = make_mig(part)
    geometry = mig.geometry
    profiles = list(geometry.profiles.values())
    for destroys, pick, start in moves:
        held = [(instance.profile, instance.start) for instance in mig.instances.values()]
        if destroys and held:
            mig.destroy_instance(sorted(mig.instances)[pick % len(mig.instances)])
            continue
        profile = profiles[pick % len(profiles)]
        free = reference_free(geometry, held, profile)
        assert list(mig.list_free_starts(profile)) == free
        assert (mig.count_remaining(profile.id) > 0) == bool(free)
        expected = choose_driver_placement(geometry, profile, free) if free and start < 0 else start
        made = create(mig, profile.id, None if start < 0 else start)
        if expected in free:
            assert made == (profile.id, gi_id(expected, profile.size, geometry.memory_slices), expected, profile.size)
        else:
            assert made is (DriverRefusal.NO_ROOM if start < 0 or start in profile.starts else DriverRefusal.INVALID)


@given(part=st.sampled_from(PARTS), moves=MOVES, pick=st.integers(0, 11))
def test_the_remaining_capacity_can_be_made(part: str, moves: list[tuple[bool, int, int]], pick: int) -> None:
    mig = make_mig(part)
    profiles = list(mig.geometry.profiles.values())
    for _, number, start in moves[:6]:
        create(mig, profiles[number % len(profiles)].id, None if start < 0 else start)
    profile = profiles[pick % len(profiles)]
    for left in range(mig.count_remaining(profile.id), 0, -1):
        assert mig.count_remaining(profile.id) == left
        assert isinstance(create(mig, profile.id), tuple)
    assert create(mig, profile.id) is DriverRefusal.NO_ROOM


def test_a_policy_can_be_another() -> None:
    geometry = load_catalogue().geometries["a100-40gb"]
    mig = SimMig(geometry, UUID(int=1), branch=580, policy=lambda _geometry, _profile, free: min(free))
    mig.apply_layout(())
    assert [mig.create_instance(19).start for _ in range(3)] == [0, 1, 2]


def maximal_layouts(mig: SimMig, profiles: list[GiProfile], found: set[frozenset[tuple[int, int]]]) -> None:
    """All layouts under what stands, and the maximal ones among them."""
    layout = frozenset((instance.profile.id, instance.start) for instance in mig.instances.values())
    if layout in found:
        return
    found.add(layout)
    for profile in profiles:
        for start in mig.list_free_starts(profile):
            made = mig.create_instance(profile.id, start)
            maximal_layouts(mig, profiles, found)
            mig.destroy_instance(made.id)


@pytest.mark.parametrize(
    ("part", "keys", "branch", "layouts", "maximal"),
    [
        ("a100-40gb", ("1g", "2g", "3g", "4g", "7g"), 580, 298, 19),
        ("a100-40gb", ("1g", "2g", "3g", "4g", "7g"), 470, None, 18),
        ("a30-24gb", ("1g", "2g", "4g"), 580, 26, 5),
    ],
)
def test_there_are_as_many_layouts_as_the_published_count(
    part: str, keys: tuple[str, ...], branch: int, layouts: int | None, maximal: int
) -> None:
    mig = make_mig(part, branch)
    profiles = [mig.geometry.profiles[key] for key in keys]
    found: set[frozenset[tuple[int, int]]] = set()
    maximal_layouts(mig, profiles, found)
    assert layouts is None or len(found) == layouts
    assert sum(not any(layout < other for other in found) for layout in found) == maximal


def whole_profiles() -> Iterator[GiProfile]:
    for part in PARTS:
        yield from load_catalogue().geometries[part].profiles.values()


def test_every_profile_takes_a_compute_instance_over_all_of_it_and_over_its_slices() -> None:
    for profile in whole_profiles():
        assert [ci for ci, _ in arrange_compute_instances(profile, (profile.compute_slices,))] == [profile.whole]
        smallest = min(profile.compute_instances, key=lambda ci: ci.compute_slices)
        count = profile.compute_slices // smallest.compute_slices
        assert len(arrange_compute_instances(profile, [smallest.compute_slices] * count)) == count
        assert arrange_compute_instances(profile, [smallest.compute_slices] * (count + 1)) is None


def test_a_uuid_is_a_function_of_the_span_and_the_first_engine() -> None:
    mig = make_mig("a100-40gb")
    mig.create_instance(9, 4)
    one = mig.create_compute(2, 0, 0).uuid
    other = mig.create_compute(2, 0, 1).uuid
    mig.destroy_compute(2, 0)
    mig.destroy_compute(2, 1)
    # Another profile that begins on the same engine has the same UUID: it tells no two lives apart.
    assert mig.create_compute(2, 2).uuid == one != other
    assert make_mig("a100-40gb").create_instance(9, 4).id == 2
