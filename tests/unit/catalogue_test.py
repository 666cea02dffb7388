"""The catalogue against the facts that it restates, and the refusal of files that break a rule."""

import copy
import json
from collections.abc import Iterator
from importlib import resources

import pytest

from eelgrid_protos.catalogue.loader import CatalogueError, load_catalogue, parse_catalogue
from eelgrid_protos.catalogue.products import GiProfile, MigGeometry, gi_id, gi_span, model_name

MIB = 2**20
CATALOGUE = load_catalogue()
BASE = {"1g", "2g", "3g", "4g", "7g"}


def documents() -> tuple[dict, dict]:
    files = resources.files("eelgrid_protos.catalogue")
    return tuple(json.loads(files.joinpath(name).read_text("utf-8")) for name in ("products.json", "mig.json"))


def test_every_product_and_every_mig_part_is_there() -> None:
    names = {name for product in CATALOGUE.products.values() for name in product.nvml_names}
    assert {
        "Tesla T4",
        "Tesla P100-PCIE-16GB",
        "Tesla V100-SXM2-16GB",
        "Tesla V100-SXM2-32GB",
        "Tesla V100-PCIE-16GB",
        "Tesla V100-PCIE-32GB",
        "NVIDIA A10",
        "NVIDIA A10G",
        "NVIDIA A30",
        "NVIDIA A40",
        "NVIDIA A100-SXM4-40GB",
        "NVIDIA A100-PCIE-40GB",
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA A100 80GB PCIe",
        "NVIDIA L4",
        "NVIDIA L40",
        "NVIDIA L40S",
        "NVIDIA H100 PCIe",
        "NVIDIA H100 80GB HBM3",
        "NVIDIA H100 NVL",
        "NVIDIA H200",
        "NVIDIA H200 NVL",
        "NVIDIA B200",
        "NVIDIA GB200",
        "NVIDIA GB300",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "NVIDIA GH200 480GB",
        "NVIDIA GH200 144G HBM3e",
        "NVIDIA B300 SXM6 AC",
    } <= names
    assert set(CATALOGUE.geometries) == {
        "a100-40gb",
        "a100-80gb",
        "h100-80gb-sxm",
        "h100-80gb-pcie",
        "h100-94gb-nvl",
        "h100-96gb",
        "gh200-144gb",
        "h200-141gb",
        "b200-180gb",
        "gb200-186gb",
        "b300-269gb",
        "gb300-278gb",
        "a30-24gb",
        "rtx-pro-6000-blackwell",
    }
    # Each part can be simulated and recognised, for each is some product's.
    assert {product.mig.key for product in CATALOGUE.products.values() if product.mig} == set(CATALOGUE.geometries)


@pytest.mark.parametrize(
    ("model", "idle_w", "busy_w"),
    [
        ("T4", 10, 70),
        ("A10", 30, 150),
        ("P100", 25, 250),
        ("V100M16", 30, 300),
        ("V100M32", 30, 300),
        ("G2", 30, 150),
        ("G3", 50, 400),
    ],
)
def test_the_openb_models_have_the_papers_watts(model: str, idle_w: float, busy_w: float) -> None:
    product = CATALOGUE.products[f"openb-{model.lower()}"]
    assert (product.model, product.idle_w, product.busy_w) == (model, idle_w, busy_w)
    assert product.kinds["idle_w"] == product.kinds["busy_w"] == "paper"


def test_watts_and_clocks_are_the_captured_ones() -> None:
    a100 = CATALOGUE.products["a100-sxm4-40gb"]
    assert (a100.idle_w, a100.idle_mig_w, a100.power_min_w, a100.power_max_w) == (49.7, 66.9, 100, 400)
    assert (a100.sm_clock_min_mhz, a100.sm_clock_max_mhz, a100.sm_clock_step_mhz) == (210, 1410, 15)
    assert CATALOGUE.products["b200"].idle_w == 200.0  # the middle of 194 to 206
    assert CATALOGUE.products["h100-nvl-94gb"].power_min_w is None
    assert CATALOGUE.products["v100-pcie-16gb"].kinds["idle_w"] == "assumed"
    assert not CATALOGUE.products["p100-pcie-16gb"].has_energy_counter
    assert not CATALOGUE.products["a100-sxm4-40gb"].sensor.averaged


def test_a_product_is_found_by_name_with_or_without_its_brand_and_not_against_its_memory() -> None:
    assert CATALOGUE.find_product("NVIDIA A100-SXM4-40GB", 40960 * MIB).key == "a100-sxm4-40gb"
    assert CATALOGUE.find_product("A100-SXM4-40GB", None).key == "a100-sxm4-40gb"
    assert CATALOGUE.find_product("Tesla V100-SXM2-32GB", 32480 * MIB).key == "v100-sxm2-32gb"
    assert CATALOGUE.find_product("NVIDIA A100-SXM4-40GB", 81920 * MIB) is None
    assert CATALOGUE.find_product("NVIDIA A100", None) is None
    assert CATALOGUE.find_product("Tesla T4", 15360 * MIB).key == "t4"


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-80GB-HBM3"),
        ("Tesla T4", "T4"),
        ("Quadro (R) 6000!", "Quadro-R-6000"),
        ("", "unknown"),
        ("NVIDIA " + "x" * 400, "x" * 253),
    ],
)
def test_a_model_is_a_name(name: str, model: str) -> None:
    assert model_name(name) == model


# GPU instance ids as real drivers printed them: (memory slices, id, start, size).
OBSERVED = [
    (4, 3, 0, 1), (4, 4, 1, 1), (4, 2, 2, 2), (8, 2, 4, 4), (8, 7, 0, 1), (8, 4, 2, 2), (8, 8, 1, 1), (8, 5, 4, 2),
    (8, 13, 6, 1), (8, 9, 2, 1), (8, 10, 3, 1), (8, 11, 4, 1), (8, 3, 0, 2), (8, 1, 0, 4), (8, 0, 0, 8), (4, 0, 0, 4),
]  # fmt: skip


@pytest.mark.parametrize(("slices", "number", "start", "size"), OBSERVED)
def test_ids_are_those_that_drivers_printed(slices: int, number: int, start: int, size: int) -> None:
    assert gi_id(start, size, slices) == number
    assert gi_span(number, slices) == (start, size)


def test_ids_tell_all_spans_apart() -> None:
    for slices in (4, 8):
        spans = [(start, size) for size in (1, 2, 4, 8) if size <= slices for start in range(0, slices, size)]
        assert sorted(gi_id(*span, slices) for span in spans) == list(range(2 * slices - 1))
        assert all(gi_span(gi_id(*span, slices), slices) == span for span in spans)


Layout = frozenset[tuple[str, int]]


def layouts(geometry: MigGeometry, keys: set[str]) -> set[Layout]:
    """All valid layouts of these profiles, the empty one included."""
    options = [
        (profile, start) for key, profile in geometry.profiles.items() if key in keys for start in profile.starts
    ]

    def grow(chosen: list[tuple[GiProfile, int]], place: int) -> Iterator[Layout]:
        yield frozenset((profile.key, start) for profile, start in chosen)
        for other in range(place, len(options)):
            if geometry.conflict([*chosen, options[other]]) is None:
                yield from grow([*chosen, options[other]], other + 1)

    return set(grow([], 0))


def counts(geometry: MigGeometry, keys: set[str]) -> tuple[int, int, int, int, int]:
    """Maximal layouts, their multisets, multisets maximal by inclusion, all layouts, all multisets."""
    every = layouts(geometry, keys)
    singles = {item for layout in every for item in layout}
    maximal = [layout for layout in every if not any(layout | {item} in every for item in singles - layout)]

    def bag(layout: Layout) -> tuple[str, ...]:
        return tuple(sorted(key for key, _ in layout))

    bags = {bag(layout) for layout in every}
    top = [b for b in bags if not any(tuple(sorted((*b, key))) in bags for key in keys)]
    return len(maximal), len({bag(layout) for layout in maximal}), len(top), len(every), len(bags)


SEVEN = [key for key, geometry in CATALOGUE.geometries.items() if geometry.memory_slices == 8]


@pytest.mark.parametrize("key", SEVEN)
def test_seven_slice_parts_have_19_maximal_layouts(key: str) -> None:
    assert counts(CATALOGUE.geometries[key], BASE) == (19, 14, 12, 298, 38)


@pytest.mark.parametrize("key", ["a30-24gb", "rtx-pro-6000-blackwell"])
def test_four_slice_parts_have_5_maximal_layouts(key: str) -> None:
    assert counts(CATALOGUE.geometries[key], BASE) == (5, 4, 4, 26, 10)


def test_the_double_memory_and_media_profiles_add_their_layouts() -> None:
    geometry = CATALOGUE.geometries["a100-40gb"]
    assert counts(geometry, BASE | {"1g.2x"}) == (78, 38, 28, 723, 78)
    assert counts(geometry, BASE | {"1g.2x", "1g+me"}) == (239, 64, 44, 2319, 128)


@pytest.mark.parametrize(
    ("part", "key", "name", "memory_mib", "sm_count"),
    [
        ("a100-40gb", "1g", "1g.5gb", 4864, 14),
        ("a100-40gb", "7g", "7g.40gb", 40192, 98),
        ("a100-80gb", "3g", "3g.40gb", 40192, 42),
        ("h100-80gb-sxm", "3g", "3g.40gb", 40448, 60),
        ("h100-80gb-sxm", "1g.2x", "1g.20gb", 20096, 26),
        ("h100-80gb-pcie", "7g", "7g.80gb", 81152, 114),
        ("h100-94gb-nvl", "4g", "4g.47gb", 47488, 64),
        ("h100-96gb", "2g", "2g.24gb", 23552, 32),
        ("gh200-144gb", "7g", "7g.144gb", None, 132),
        ("h200-141gb", "4g", "4g.71gb", 71168, 64),
        ("b200-180gb", "2g", "2g.45gb", 45312, 36),
        ("gb200-186gb", "1g.2x", "1g.47gb", 46592, 32),
        ("b300-269gb", "7g", "7g.269gb", None, None),
        ("gb300-278gb", "3g", "3g.139gb", None, None),
        ("a30-24gb", "2g+me", "2g.12gb+me", 11968, 28),
        ("rtx-pro-6000-blackwell", "4g+gfx", "4g.96gb+gfx", 97280, 188),
    ],
)
def test_profiles_have_the_listed_sizes(
    part: str, key: str, name: str, memory_mib: int | None, sm_count: int | None
) -> None:
    profile = CATALOGUE.geometries[part].profiles[key]
    assert (profile.name, profile.memory_mib, profile.sm_count) == (name, memory_mib, sm_count)
    assert profile.whole.sm_count == sm_count
    assert CATALOGUE.geometries[part].profile(name) is profile
    assert CATALOGUE.geometries[part].profile_by_id(profile.id) is profile


def test_profile_ids_are_not_their_enumeration() -> None:
    ids = {key: (profile.id, profile.enum) for key, profile in CATALOGUE.geometries["h200-141gb"].profiles.items()}
    assert ids == {
        "1g": (19, 0),
        "1g+me": (20, 7),
        "1g.2x": (15, 9),
        "2g": (14, 1),
        "3g": (9, 2),
        "4g": (5, 3),
        "7g": (0, 4),
    }


@pytest.mark.parametrize(
    ("instances", "why"),
    [
        ([("3g", 2)], "cannot start at 2"),
        ([("4g", 0), ("1g", 3)], "overlaps"),
        ([("1g+me", 0), ("1g+me", 1)], "1 times at most"),
        # Seven memory slices and seven compute slices are not eight.
        ([("4g", 0), ("3g", 4)], None),
        ([("1g", s) for s in range(4)] + [("3g", 4)], None),
        ([("4g", 0), ("1g", 4), ("1g", 5), ("1g.2x", 6)], None),
        ([("2g", 0), ("2g", 2), ("2g", 4), ("1g.2x", 6)], None),
        ([("4g", 0), ("2g", 4), ("1g", 6)], None),
    ],
)
def test_conflicts_say_why(instances: list[tuple[str, int]], why: str | None) -> None:
    geometry = CATALOGUE.geometries["a100-40gb"]
    conflict = geometry.conflict((geometry.profiles[key], start) for key, start in instances)
    assert conflict is None if why is None else why in conflict


def test_compute_slices_run_out_before_memory_slices() -> None:
    geometry = CATALOGUE.geometries["a30-24gb"]
    assert "overlaps" in geometry.conflict([(geometry.profiles["4g"], 0), (geometry.profiles["1g"], 0)])
    seven = CATALOGUE.geometries["a100-40gb"]
    narrow = MigGeometry(
        key="x",
        nvml_names=(),
        architecture="",
        memory_slices=8,
        compute_slices=6,
        most=7,
        reset_to_change_mode=False,
        mode_survives_reboot=False,
        sm_total=None,
        driver_least=None,
        profiles=seven.profiles,
    )
    assert "7 compute slices" in narrow.conflict([(seven.profiles["4g"], 0), (seven.profiles["3g"], 4)])


def _break(document: dict, path: str, value: object) -> None:
    *parents, last = path.split("/")
    for parent in parents:
        document = document[int(parent) if parent.isdigit() else parent]
    if value is ...:
        del document[last]
    else:
        document[last] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", 2, "reads format 1"),
        ("products/0/idle_w", ..., "t4.idle_w: is missing"),
        ("products/0/idle_w", 33.5, "is not of type list"),
        ("products/0/idle_w", [33.5, "hearsay"], "'hearsay' is unknown"),
        ("products/0/idle_w", [0, "capture"], "not positive"),
        ("products/0/idle_w", [float("nan"), "capture"], "not positive"),
        ("products/0/idle_w", [True, "capture"], "is not \\[number, kind\\]"),
        ("products/0/idle_w", [71, "capture"], "idle_w <= busy_w does not hold"),
        ("products/0/power_min_w", [80, "capture"], "power_min_w <= power_default_w"),
        ("products/0/idel_w", [1, "capture"], "'idel_w'"),
        ("products/0/sensor", "kepler", "is no sensor class"),
        ("products/0/mig", "a100", "is no part"),
        ("products/1/key", "t4", "t4 is there twice"),
        ("products/1/nvml_names", [], "is empty"),
    ],
)
def test_a_wrong_product_is_refused_with_its_place(path: str, value: object, message: str) -> None:
    products, mig = documents()
    _break(products, path, value)
    with pytest.raises(CatalogueError, match=message):
        parse_catalogue(products, mig)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("shapes/seven/profiles/3g/starts", [0, 2], "start 2 is off the part or not aligned"),
        ("shapes/seven/profiles/3g/starts", [8], "off the part"),
        ("shapes/seven/profiles/3g/size", 3, "does not halve"),
        ("shapes/seven/profiles/3g/id", 14, "share one id"),
        ("shapes/seven/profiles/3g/compute_instances", [], "needs one compute instance"),
        ("parts/0/profiles/3g", ..., "the shape has"),
        ("parts/0/shape", "six", "is no shape"),
        ("parts/0/colour", "green", "'colour'"),
    ],
)
def test_a_wrong_geometry_is_refused_with_its_place(path: str, value: object, message: str) -> None:
    products, mig = copy.deepcopy(documents())
    _break(mig, path, value)
    with pytest.raises(CatalogueError, match=message):
        parse_catalogue(products, mig)
