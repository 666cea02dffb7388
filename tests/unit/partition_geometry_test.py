"""Layouts and patterns are those that the catalogue's placements imply."""

import pytest
from tests import naive_partition

from eelgrid_controller.partition.geometry import build_tiling, maximal_multisets, memory_slice_mask
from eelgrid_controller.partition.problem import InvalidProblem
from eelgrid_protos.catalogue.loader import load_catalogue

SEVEN, FOUR = ("1g", "2g", "3g", "4g", "7g"), ("1g", "2g", "4g")
PARTS = load_catalogue().geometries
# Of the MIG guide: what an A100 can be cut into and no more fits.
A100_PATTERNS = {
    "7",
    "43",
    "421",
    "4111",
    "33",
    "322",
    "3211",
    "31111",
    "2221",
    "22111",
    "211111",
    "1111111",
}


def _plain(part):
    return SEVEN if "7g" in PARTS[part].profiles else FOUR


@pytest.mark.parametrize("part", sorted(PARTS))
def test_every_layout_that_the_placements_allow_and_no_other(part):
    keys = _plain(part)
    plan = build_tiling(PARTS[part], keys)
    found = [frozenset(layout) for layouts in plan.places.values() for layout in layouts]
    assert len(found) == len(set(found))
    assert set(found) == set(naive_partition.list_layouts(part, keys))


def test_twelve_patterns_of_the_a100():
    plan = build_tiling(PARTS["a100-80gb"], SEVEN)
    spelled = {
        "".join(key[0] * count for key, count in zip(plan.keys, counts, strict=True)) for counts in plan.patterns
    }
    assert spelled == A100_PATTERNS


@pytest.mark.parametrize(
    ("part", "keys", "layouts", "multisets", "patterns"),
    [
        ("a100-80gb", SEVEN, 298, 38, 12),
        ("a100-80gb", (*SEVEN, "1g.2x"), 723, 78, 28),
        ("a100-80gb", (*SEVEN, "1g.2x", "1g+me"), 2319, 128, 44),
        ("a30-24gb", FOUR, 26, 10, 4),
    ],
)
def test_counts_worked_out_apart(part, keys, layouts, multisets, patterns):
    plan = build_tiling(PARTS[part], keys)
    assert sum(map(len, plan.places.values())) == layouts
    assert (len(plan.places), len(plan.patterns)) == (multisets, patterns)


def test_any_part_of_a_pattern_stands():
    plan = build_tiling(PARTS["h100-80gb-sxm"], SEVEN)
    for pattern in plan.patterns:
        for number, count in enumerate(pattern):
            for fewer in range(count):
                part = (*pattern[:number], fewer, *pattern[number + 1 :])
                geometry = plan.geometry
                layout = plan.choose_layout(part)
                assert plan.counts(layout) == part
                assert geometry.conflict([(geometry.profiles[key], start) for key, start in layout]) is None


def test_three_slices_stand_at_four():
    """So that 0 to 3 stay for four, two or ones."""
    plan = build_tiling(PARTS["a100-80gb"], SEVEN)
    assert plan.keys == ("7g", "4g", "3g", "2g", "1g")
    assert plan.choose_layout((0, 0, 1, 0, 0)) == (("3g", 4),)
    assert plan.choose_layout((0, 0, 1, 2, 0)) == (("2g", 0), ("2g", 2), ("3g", 4))


def test_what_cannot_stand_is_reported():
    plan = build_tiling(PARTS["a30-24gb"], FOUR)
    with pytest.raises(InvalidProblem, match=r"3 2g do not fit together on a30-24gb; ask for less"):
        plan.choose_layout((0, 3, 0))
    with pytest.raises(InvalidProblem, match=r"a30-24gb has no profile 3g; use one of"):
        build_tiling(PARTS["a30-24gb"], ("3g",))


def test_patterns_are_those_contained_in_no_other():
    assert maximal_multisets([(0, 0), (1, 0), (0, 1), (1, 1), (2, 0)]) == ((2, 0), (1, 1))
    assert maximal_multisets([]) == ()


def test_memory_slices_bit_by_bit():
    geometry = PARTS["a100-80gb"]
    assert memory_slice_mask(geometry, "3g", 4) == 0b11110000
    assert memory_slice_mask(geometry, "1g", 6) == 0b01000000
