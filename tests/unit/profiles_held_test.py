"""What the daemon holds: observe, predict, learn again when due, write down and read back."""

import json
import subprocess
import sys

import pytest
from tests.builders.profiles import (
    A100,
    FAMILY,
    STRANGER,
    build_lawful_point,
    learn_laws,
    list_configurations,
    measure_store,
    read_catalogue,
)

from eelgrid_controller.profiles.features import COLUMNS_MOST, FeaturePoint, fit_frame
from eelgrid_controller.profiles.gaussian_process import COORDINATES
from eelgrid_controller.profiles.learning import learn_family
from eelgrid_controller.profiles.points import (
    Configuration,
    EstimateBasis,
    ImpossibleReading,
    Point,
    UnknownSlice,
    UnreadableRecord,
)
from eelgrid_controller.profiles.profile_service import (
    RECORD_FORMAT,
    RELEARN_GROWTH,
    ProfileService,
    decode_record,
    encode_record,
)
from eelgrid_controller.profiles.store import ProfiledWorkload, ProfileReading

WHOLE = Configuration(A100, batch=16)
ASKED = [WHOLE, Configuration(A100, "2g", batch=8), Configuration(A100, batch=8, power_limit_w=230.0)]


def _held():
    return ProfileService(read_catalogue(), measure_store(), {FAMILY: learn_laws()})


def test_points_go_in_and_answers_come_out():
    held = ProfileService(read_catalogue())
    assert held.snapshot().profiles == {}
    assert held.families_due() == ()
    for second, how in enumerate(list_configurations()):
        held.add_workload(ProfiledWorkload("middle", FAMILY)) if second == 0 else None
        held.observe(build_lawful_point("middle", how), float(second))
    assert held.snapshot().profiles["middle"].readings == 24
    assert held.predict("middle", WHOLE).throughput_hz is None  # nothing was learned, and limits differ
    assert held.families_due() == (FAMILY,)
    held.adopt_family(learn_family(held.snapshot(), FAMILY, read_catalogue()))
    assert held.families_due() == ()
    found = held.predict("middle", Configuration(A100, batch=8, power_limit_w=400.0)).throughput_hz
    assert found.basis is EstimateBasis.INTERPOLATED
    assert found.lower < found.median < found.upper


def test_a_family_is_due_when_it_has_grown():
    held = _held()
    before = max(one.learned_from for one in learn_laws().surfaces.values())
    due_at = None
    for number in range(60):
        held.observe(build_lawful_point(STRANGER, Configuration(A100, "2g", batch=2 + number)), 100.0 + number)
        if held.families_due():
            due_at = number + 1
            break
    assert held.families_due() == (FAMILY,)
    assert due_at == pytest.approx(before * (RELEARN_GROWTH - 1.0), abs=1.0)


def test_a_refused_point_changes_nothing():
    held = _held()
    before = held.snapshot()
    with pytest.raises(ImpossibleReading):
        held.observe(Point("small", WHOLE, float("nan")), 1.0)
    with pytest.raises(UnknownSlice):
        held.observe(Point("small", Configuration(A100, "8g"), 1.0), 1.0)
    with pytest.raises(UnknownSlice):  # also of a workload that is not known yet
        held.observe(Point("new", Configuration(A100, "8g"), 1.0), 1.0)
    assert held.snapshot() is before


def test_what_was_dumped_is_restored_to_the_last_bit():
    held = _held()
    for number in range(30):
        held.observe(build_lawful_point("small", WHOLE, 0.001 * (number % 3)), 100.0 + number)
    text = json.dumps(held.dump())
    again = ProfileService.restore(json.loads(text), read_catalogue())
    assert again.snapshot() == held.snapshot()
    for workload in ("small", STRANGER):
        assert again.predict_all(workload, ASKED) == held.predict_all(workload, ASKED)
    assert json.dumps(again.dump()) == text


def test_a_journal_of_points_and_of_what_was_learned_replays():
    points = [build_lawful_point(STRANGER, how, 0.002 * number) for number, how in enumerate(list_configurations())]
    held = _held()
    readings = [held.observe(one, 100.0 + second) for second, one in enumerate(points)]
    by_points, by_records = _held(), measure_store()
    for second, one in enumerate(points):
        assert by_points.observe(one, 100.0 + second) == readings[second]
        by_records = by_records.with_reading(decode_record(json.loads(json.dumps(encode_record(readings[second])))))
    assert by_points.snapshot() == held.snapshot() == by_records


@pytest.mark.parametrize(
    ("plain", "where"),
    [
        ({}, "profiles"),
        ({"profiles": {"format": RECORD_FORMAT + 1, "value": None}}, "format"),
        ({"profiles": {"format": RECORD_FORMAT, "value": {"kind": "Spoon"}}}, "value"),
        ({"profiles": {"format": RECORD_FORMAT, "value": {"kind": "Profiles", "profiles": {}}}}, "value"),
        ({"profiles": {"format": RECORD_FORMAT, "value": {"kind": "table", "pairs": [1]}}}, "value"),
        (
            {
                "profiles": {
                    "format": RECORD_FORMAT,
                    "value": {"kind": "array", "dtype": "object", "shape": [], "data": []},
                }
            },
            "value",
        ),
        (
            {
                "profiles": {
                    "format": RECORD_FORMAT,
                    "value": {"kind": "array", "dtype": "int64", "shape": [3], "data": [1]},
                }
            },
            "value",
        ),
        ({"profiles": encode_record(ProfiledWorkload("w"))}, "profiles"),
    ],
)
def test_what_cannot_be_read_is_named(plain, where):
    with pytest.raises(UnreadableRecord) as caught:
        ProfileService.restore(plain, read_catalogue())
    assert caught.value.field == where
    assert caught.value.remedy


def test_what_was_never_part_of_a_record_is_refused():
    with pytest.raises(TypeError, match="object"):
        encode_record({"a": object()})
    nested = []
    for _ in range(40):
        nested = [nested]
    with pytest.raises(UnreadableRecord, match="too deep"):
        decode_record({"format": RECORD_FORMAT, "value": nested})


def test_learning_is_a_function_of_the_store_and_the_seed():
    few = ProfileService(read_catalogue())
    for second, how in enumerate(list(list_configurations())[:8]):
        few.observe(build_lawful_point("small", how), float(second))
    first, second = (learn_family(few.snapshot(), "default", read_catalogue(), seed=3) for _ in range(2))
    assert json.dumps(encode_record(first)) == json.dumps(encode_record(second))
    assert first.revision == few.snapshot().revision


def test_labels_bring_no_more_coordinates_than_the_limit():
    names = [f"label.k{number:03}" for number in range(3 * COLUMNS_MOST)]
    places = [FeaturePoint({name: float(row) for name in names[: COLUMNS_MOST * (1 + row)]}, {}) for row in (0, 1, 2)]
    frame = fit_frame(places, [{}] * 3)
    assert len(frame.numbers) == COLUMNS_MOST
    assert frame.unknown_features(places[2])  # what was left out cannot be answered
    assert frame.build_sites(places, [{}] * 3, ["w"] * 3).shape == (3, COORDINATES + COLUMNS_MOST)


def test_a_stated_error_of_a_reading_is_kept():
    held = _held()
    reading = held.observe(build_lawful_point("small", WHOLE), 1.0, {"throughput_hz": 0.2})
    assert reading == ProfileReading(
        build_lawful_point("small", WHOLE), 1.0, noise={"throughput_hz": 0.2}, expected=reading.expected
    )
    assert held.snapshot().profiles["small"].cells[WHOLE].tallies["throughput_hz"].stated == 0.2


def test_the_daemon_answers_without_scikit_learn():
    """What it imports at its start, reads back what a child has learned and predicts loads none of it."""
    code = """
import json, sys
import eelgrid_controller.composition, eelgrid_controller.objectives.forecasts
from eelgrid_controller.profiles.profile_service import ProfileService
from eelgrid_controller.profiles.points import Configuration
from eelgrid_protos.catalogue.loader import load_catalogue
held = ProfileService.restore(json.load(sys.stdin), load_catalogue())
found = held.predict(sys.argv[1], Configuration(sys.argv[2], batch=8, power_limit_w=230.0))
print(json.dumps([found.throughput_hz[:3], [name for name in sys.modules if name.partition(".")[0] == "sklearn"]]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, STRANGER, A100],
        input=json.dumps(_held().dump()),
        capture_output=True,
        text=True,
        check=True,
    )
    expected = _held().predict(STRANGER, Configuration(A100, batch=8, power_limit_w=230.0)).throughput_hz
    assert json.loads(done.stdout) == [list(expected[:3]), []]
