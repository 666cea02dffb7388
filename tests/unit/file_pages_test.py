"""The pages of the workload file and the fleet file name every field, and their parsers take what the pages show."""

import re
from types import SimpleNamespace

import pytest
import yaml
from docs import file_pages
from tests.docs_rig import DOCS, blocks_of

from eelgrid_agent.simulation import spec
from eelgrid_controller.cli.connection import RequestRefused
from eelgrid_controller.cli.whatif import parse_changes
from eelgrid_controller.cli.workloads import read_workloads
from eelgrid_protos.messages import ArrayElement, JobArrayRequest, WhatIfChange, WorkloadKind, WorkloadSpec
from eelgrid_protos.schema import fields_of

WORKLOADS, FLEET = DOCS / "reference" / "workload-file.md", DOCS / "reference" / "fleet-file.md"


def _blocks(page, language):
    return [block.text for block in blocks_of(page) if block.language == language]


def _messages(cls, known=()):
    """A message and all that it is made of."""
    found = [cls]
    for entry in fields_of(cls):
        shapes = [entry.shape, *filter(None, [entry.shape.item])]
        for one in {shape.type for shape in shapes if shape.kind == "message"} - {*known, cls}:
            found += _messages(one, (*known, *found))
    return found


def test_every_field_of_a_workload_is_in_a_table_of_its_page():
    page = WORKLOADS.read_text()
    # In a file, `array` says which elements there are; which of them one is, the controller says.
    for cls in {*_messages(WorkloadSpec), JobArrayRequest} - {ArrayElement}:
        assert file_pages.message_table(cls) in page, cls.__name__


def test_every_kind_of_change_and_its_fields_are_in_a_table():
    page = FLEET.read_text()
    (entry,) = fields_of(WhatIfChange)
    for cls in entry.shape.choices:
        assert f"### {cls.__name__}\n" in page
        assert not fields_of(cls) or file_pages.message_table(cls) in page


def test_a_field_without_a_meaning_is_an_error(monkeypatch):
    short = {name: text for name, text in file_pages.MEANINGS[WorkloadSpec].items() if name != "queue"}
    monkeypatch.setattr(file_pages, "MEANINGS", {**file_pages.MEANINGS, WorkloadSpec: short})
    with pytest.raises(ValueError, match="WorkloadSpec"):
        file_pages.message_table(WorkloadSpec)


def test_the_parser_takes_the_examples_of_workloads():
    texts = _blocks(WORKLOADS, "yaml")
    found = [request.spec for text in texts for request in read_workloads(text, "the page")]
    assert {spec.kind for spec in found} == {kind for kind in WorkloadKind if kind}
    assert any(one.service for one in found)
    assert any(one.training and one.training.deadline_ns for one in found)


@pytest.mark.parametrize(
    ("amounts", "expected"),
    [
        ("cpu: 2.5", (2500, 0, 0, 0)),
        ("cpu: 2500m", (2500, 0, 0, 0)),
        ("memory: 16GiB", (0, 2**34, 0, 0)),
        ("memory: 16Gi", (0, 2**34, 0, 0)),
        ("memory: 16GB", (0, 16 * 10**9, 0, 0)),
        ("gpus: 2", (0, 0, 2, 1000)),
        ("gpus: 1, gpu_share: 50%", (0, 0, 1, 500)),
    ],
)
def test_amounts_are_read_as_their_table_says(amounts, expected):
    (found,) = read_workloads(f"{{name: a, request: {{{amounts}}}}}", "-")
    request = found.spec.request
    assert (request.cpu_milli, request.memory_bytes, request.gpu_count, request.gpu_milli) == expected


def test_what_the_page_does_not_name_is_refused():
    with pytest.raises(RequestRefused) as refused:
        read_workloads("{name: a, image: b, request: {cpu: 1}}", "-")
    assert [one.field for one in refused.value.violations] == ["image"]


def _recorded(monkeypatch, path):
    """The fields that the reader of a fleet file takes, with bounds and default, by object."""
    taken = {}

    def noting(name):
        kept = getattr(spec._Fields, name)

        def note(self, field, *bounds, **options):
            low_high = bounds if name != "take_field" else ()
            taken.setdefault(re.sub(r"\[\d+\]$", "", self._path), {}).setdefault(field, (low_high, options))
            return kept(self, field, *bounds, **options)

        monkeypatch.setattr(spec._Fields, name, note)

    for name in ("whole", "number", "texts", "take_field"):
        noting(name)
    spec.load_fleet(path)
    return taken


def test_every_field_of_the_fleet_file_is_on_its_page_with_its_bounds(tmp_path, monkeypatch):
    path = tmp_path / "fleet.json"
    path.write_text(_blocks(FLEET, "json")[0])
    taken = _recorded(monkeypatch, path)
    assert set(taken[""]) == {"nodes"}
    for place, key in (("nodes", "node"), ("nodes[0].gpus", "gpu")):
        rows = {row[0]: row for row in file_pages.FLEET_FIELDS[key]}
        assert set(rows) == set(taken[place])
        for name, (bounds, options) in taken[place].items():
            if bounds:
                low, high = (
                    "2^50" if bound == 2**50 else f"{bound:g}" if bound < 1e5 else str(bound) for bound in bounds
                )
                assert rows[name][2] == f"{low} to {high}", name
            default = options.get("default", ...)
            if isinstance(default, int | float):
                assert rows[name][3] == f"{default:g}", name
            assert (rows[name][3] == "required") == (default is ... and name != "labels"), name


@pytest.mark.parametrize("language", ["json", "toml"])
def test_the_simulation_takes_the_examples_of_fleets(tmp_path, language):
    (text,) = _blocks(FLEET, language)
    path = tmp_path / f"fleet.{language}"
    path.write_text(text)
    assert [node.node_name for node in spec.load_fleet(path)][:2] == ["gpu-0", "gpu-1"]


def test_whatif_takes_the_example_of_changes():
    (text,) = _blocks(FLEET, "yaml")
    file = SimpleNamespace(read=lambda _: text, name="the page")
    nothing = dict.fromkeys(("objective", "file", "cpu", "memory", "gpus", "gpu_share", "anew"))
    lists = dict.fromkeys(("drain", "remove", "add", "add_like", "weight", "budget", "cancel"), ())
    found = parse_changes({"changes": file, "copies": 1, **nothing, **lists}, lambda: None)
    assert [type(one.change).__name__ for one in found] == [next(iter(row)) for row in yaml.safe_load(text)]
