"""The generated trace has the published one's marginals."""

import os
from collections import Counter
from pathlib import Path

import pytest

from eelgrid_controller.replay.csv_reader import TraceMalformed
from eelgrid_controller.replay.openb import NODE_LIST, fleet_document, task_list_name
from eelgrid_controller.replay.trace_loading import TraceSearch, TraceSource, locate_openb, synthesize_openb
from eelgrid_protos import catalogue


def _shape(row):
    return row.cpu_milli, row.memory_bytes, row.gpu_count, row.gpu_model


def _class(row):
    return row.cpu_milli, row.memory_bytes, row.gpu_count, row.gpu_milli, row.gpu_models


def test_the_totals_are_the_published_ones():
    nodes, tasks = synthesize_openb()
    assert (len(nodes), len(tasks)) == (1213, 8152)
    assert sum(node.gpu_count for node in nodes) == 6212
    assert sum(node.cpu_milli for node in nodes) == 107_018_000
    assert sum(task.gpu_count * task.gpu_milli for task in tasks) == 6_086_800
    assert len({node.name for node in nodes}) == 1213
    assert len({task.name for task in tasks}) == 8152


def test_seeds():
    assert synthesize_openb(1) == synthesize_openb(1)
    assert synthesize_openb(1)[1] != synthesize_openb(2)[1]
    assert Counter(map(_class, synthesize_openb(1)[1])) == Counter(map(_class, synthesize_openb(2)[1]))


def test_the_marginals_equal_the_trace():
    """Compares with the published files where they are at hand; the totals above hold anywhere."""
    surroundings = TraceSearch.from_environment({**os.environ, "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", "")})
    offline = TraceSearch(
        environment=surroundings.environment,
        directory=surroundings.directory,
        project=surroundings.project,
        cache=surroundings.cache,
        fetch=None,
    )
    trace = locate_openb("auto", offline)
    if trace.source is TraceSource.GENERATED:
        pytest.skip(f"{NODE_LIST} and {task_list_name('default')} are not at hand; set EELGRID_DATA")
    nodes, tasks = synthesize_openb()
    assert Counter(map(_shape, nodes)) == Counter(map(_shape, trace.nodes))
    assert Counter(map(_class, tasks)) == Counter(map(_class, trace.tasks))
    assert Path(trace.where).is_dir()


def test_the_fleet_file_has_every_node_and_known_products():
    nodes, _ = synthesize_openb()
    products = catalogue.load_catalogue().products
    entries = fleet_document(nodes, products)["nodes"]
    assert [entry["name"] for entry in entries] == [node.name for node in nodes]
    assert {gpu["product"] for entry in entries for gpu in entry["gpus"]} <= set(products)
    first = entries[0]
    assert first["gpus"][0]["count"] == nodes[0].gpu_count
    assert first["memory_bytes"] == nodes[0].memory_bytes


def test_a_model_without_watts_is_refused():
    nodes, _ = synthesize_openb()
    with pytest.raises(TraceMalformed, match="A10"):
        fleet_document(nodes[:1], ["openb-a10"] if nodes[0].gpu_model != "A10" else ["openb-a100"])
