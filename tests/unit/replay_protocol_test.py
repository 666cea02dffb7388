"""The protocol of the openb comparison: the same draw for the same seed, inflation and thinning to the last task."""

import os
from pathlib import Path

import numpy as np
import pytest
from bench.openb import traces

from eelgrid_controller.replay import openb_protocol
from eelgrid_controller.replay.csv_reader import TraceError, TraceMalformed, TraceMissing
from eelgrid_controller.replay.openb import NODE_LIST, TraceNode, TraceTask, task_list_name
from eelgrid_controller.replay.trace_loading import synthesize_openb
from eelgrid_protos.quantities import MIB

DATA = Path(os.environ.get("EELGRID_DATA", Path(__file__).parents[2].parent / "shared" / "data"))


def _node(name, gpus=2, model="T4", cpu_milli=64_000, memory_mib=1024):
    return TraceNode(
        name=name,
        cpu_milli=cpu_milli,
        memory_bytes=memory_mib * MIB,
        gpu_count=gpus,
        gpu_model=model if gpus else "",
    )


def _task(name, cpu_milli=1000, gpus=1, milli=1000, models=(), memory_mib=16):
    return TraceTask(
        name=name,
        cpu_milli=cpu_milli,
        memory_bytes=memory_mib * MIB,
        gpu_count=gpus,
        gpu_milli=milli if gpus else 0,
        gpu_models=models,
    )


def _asked(trace, order):
    return int(trace.task_milli[order].sum())


@pytest.fixture
def generated():
    nodes, tasks = synthesize_openb()
    return openb_protocol.build_trace("generated", nodes[:60], tasks[:300])


def test_rows_become_arrays_and_classes():
    nodes = (_node("b", 2, "T4"), _node("a", 0), _node("c", 8, "G2", cpu_milli=96_000, memory_mib=2048))
    tasks = (
        _task("t2", models=("T4", "G2")),
        _task("t0", cpu_milli=4000, gpus=0),
        _task("t1", models=("G2", "T4")),  # the same class as t2
        _task("t3", models=("T4",), milli=500),
    )
    trace = openb_protocol.build_trace("small", nodes, tasks)
    assert trace.models == ("G2", "T4")
    fleet = trace.fleet
    assert fleet.model.tolist() == [1, -1, 0]
    assert (fleet.gpu_count.tolist(), fleet.gpu_milli) == ([2, 0, 8], 10_000)
    assert (fleet.idle_w.tolist(), fleet.busy_w.tolist()) == ([10.0, 0.0, 30.0], [70.0, 0.0, 150.0])
    assert fleet.memory_mib.tolist() == [1024, 1024, 2048]
    asked = [
        (int(trace.specs.cpu_milli[s]), int(trace.task_milli[s]), trace.specs.allows[s].tolist())
        for s in trace.task_spec
    ]
    assert asked == [(4000, 0, [1, 1]), (1000, 1000, [1, 1]), (1000, 1000, [1, 1]), (1000, 500, [0, 1])]
    assert all(array.flags.c_contiguous for array in (*trace.specs, *fleet))


def test_the_mix_is_the_most_frequent_that_cover_95_percent_whatever_their_memory():
    tasks = [_task(f"a{i:02}", memory_mib=16 + i) for i in range(12)]  # one class of the mix, twelve specs
    tasks += [_task(f"b{i:02}", gpus=0, cpu_milli=2000) for i in range(7)]
    tasks += [_task("c00", milli=500)]
    trace = openb_protocol.build_trace("mix", (_node("n"),), tuple(tasks))
    assert trace.typical.weight.tolist() == [12, 7]  # 19 of 20 tasks: exactly 95 %
    assert trace.task_milli[trace.typical.spec].tolist() == [1000, 0]
    beyond = openb_protocol.build_trace("mix", (_node("n"),), (*tasks, _task("d00", milli=300)))
    assert beyond.typical.weight.tolist() == [12, 7, 1]  # 19 of 21 are not enough; of equals, the one that asks less
    assert beyond.task_milli[beyond.typical.spec].tolist() == [1000, 0, 300]


def test_a_seed_decides_all_and_another_seed_other_things(generated):
    first, again, other = (openb_protocol.arrival_order(generated, seed) for seed in (42, 42, 43))
    assert np.array_equal(first, again)
    assert first.dtype == np.int64
    assert not np.array_equal(first[: len(generated.task_spec)], other[: len(generated.task_spec)])
    rank, other_rank = (openb_protocol.node_order(generated, seed) for seed in (42, 43))
    assert sorted(rank) == list(range(60))
    assert np.array_equal(rank, openb_protocol.node_order(generated, 42))
    assert not np.array_equal(rank, other_rank)


def test_the_draws_are_the_same_on_every_machine():
    """Raw words of PCG64: a change here changes every published number of ours."""
    tasks = tuple(_task(f"t{i}", milli=100 * (i + 1)) for i in range(5))
    trace = openb_protocol.build_trace("five", (_node("n0"), _node("n1"), _node("n2")), tasks)
    assert trace.task_milli[openb_protocol.arrival_order(trace, 42)[:5]].tolist() == [500, 200, 400, 100, 300]
    assert openb_protocol.node_order(trace, 42).tolist() == [0, 1, 2]


def test_the_order_of_the_file_is_of_no_account():
    nodes, tasks = synthesize_openb()
    trace, turned = (openb_protocol.build_trace("t", nodes[:60], rows) for rows in (tasks[:300], tasks[:300][::-1]))
    assert np.array_equal(openb_protocol.arrival_order(trace, 42), openb_protocol.arrival_order(turned, 42))


@pytest.mark.parametrize("seed", range(8))
def test_inflation_ends_with_the_task_before_the_one_that_would_go_beyond(seed):
    """Every task comes once first; then draws, until the next does not fit; tasks without GPU always do."""
    tasks = (*(_task(f"w{i}") for i in range(4)), *(_task(f"s{i}", milli=300) for i in range(3)), _task("c", gpus=0))
    trace = openb_protocol.build_trace("small", tuple(_node(f"n{i}") for i in range(10)), tasks)
    order = openb_protocol.arrival_order(trace, seed)
    assert sorted(order[:8]) == sorted(trace.task_spec)
    most = 26_000  # 1.3 times 20 GPUs
    assert most - 1000 < _asked(trace, order) <= most
    assert set(order) <= set(trace.task_spec)


def test_inflation_draws_uniformly():
    """Half of the tasks ask for a tenth of a GPU: so does half of the draw, though of little GPU."""
    tasks = (*(_task(f"w{i}") for i in range(5)), *(_task(f"s{i}", milli=100) for i in range(5)))
    trace = openb_protocol.build_trace("even", tuple(_node(f"n{i}") for i in range(1000)), tasks)
    drawn = openb_protocol.arrival_order(trace, 42)[10:]
    whole = int((trace.task_milli[drawn] == 1000).sum())
    assert abs(whole - len(drawn) / 2) < 5 * (len(drawn) / 4) ** 0.5  # five deviations
    assert len(drawn) > 4000


def test_a_demand_of_exactly_the_limit_is_left_as_it_is():
    trace = openb_protocol.build_trace("exact", (_node("n", gpus=10),), tuple(_task(f"t{i:02}") for i in range(13)))
    assert len(openb_protocol.arrival_order(trace, 42)) == 13


@pytest.mark.parametrize("seed", range(8))
def test_thinning_keeps_the_order_and_takes_no_more_than_it_must(seed):
    tasks = tuple(_task(f"t{i:02}", cpu_milli=1000 + i, milli=1000 if i % 2 else 400) for i in range(60))
    trace = openb_protocol.build_trace("dense", (_node("n", gpus=10),), tasks)
    order = openb_protocol.arrival_order(trace, seed)
    assert len(set(order)) == len(order)  # every task is its own class here: nothing comes twice
    assert 13_000 - 1000 < _asked(trace, order) <= 13_000
    light = openb_protocol.build_trace("light", (_node("n", gpus=100),), tasks)  # the same tasks, none taken out
    whole = openb_protocol.arrival_order(light, seed)[:60].tolist()
    assert [spec for spec in whole if spec in set(order.tolist())] == order.tolist()


def test_what_has_no_gpu_is_refused():
    with pytest.raises(TraceMalformed, match="no GPU"):
        openb_protocol.build_trace("t", (_node("n"),), (_task("t", gpus=0),))
    with pytest.raises(TraceMalformed, match="no GPU"):
        openb_protocol.build_trace("t", (_node("n", gpus=0),), (_task("t"),))


def test_tasks_that_are_all_larger_than_the_fleet_are_refused():
    trace = openb_protocol.build_trace("large", (_node("n", gpus=2),), (_task("c", gpus=0), _task("t", gpus=8)))
    with pytest.raises(TraceMalformed, match="larger than all of its fleet"):
        openb_protocol.arrival_order(trace, 42)


def test_a_model_without_watts_is_refused_by_name():
    with pytest.raises(TraceMalformed, match=r"node n, column model.*'B300'.*V100M32"):
        openb_protocol.build_trace("t", (_node("n", model="B300"),), (_task("t"),))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / NODE_LIST).write_text("sn,cpu_milli,memory_mib,gpu,model\nn0,64000,262144,2,P100\n")
    (tmp_path / "csv" / task_list_name("mine")).write_text(
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli\np0,12000,16384,1,460\n"
    )
    return tmp_path


def test_any_list_of_the_format_is_a_trace(folder):
    assert traces.trace_names(folder) == traces.trace_names(folder / "csv") == ("mine",)
    trace = traces.load_trace(folder, "mine")
    assert (trace.name, trace.specs.gpu_milli.tolist(), trace.models) == ("mine", [460], ("P100",))


def test_errors_say_where_and_what_else_there_is(folder, tmp_path_factory):
    with pytest.raises(TraceMissing, match=r"'other'.*mine"):
        traces.load_trace(folder, "other")
    with pytest.raises(TraceMissing, match=NODE_LIST):
        traces.load_trace(tmp_path_factory.mktemp("empty"), "mine")
    (folder / "csv" / task_list_name("mine")).write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli\np0,1,1,1,x\n")
    with pytest.raises(TraceError, match=r"openb_pod_list_mine\.csv, line 2, column gpu_milli"):
        traces.load_trace(folder, "mine")


@pytest.mark.parametrize(("name", "classes"), [("default", 35), ("gpuspec33", 124)])
def test_the_mix_of_the_published_traces(name, classes):
    if not (DATA / "openb" / "csv" / task_list_name(name)).is_file():
        pytest.skip(f"{task_list_name(name)} is not here; set EELGRID_DATA to the folder of published data")
    trace = traces.load_trace(DATA, name)
    assert len(trace.typical.spec) == classes
    assert trace.fleet.gpu_milli == 6_212_000
    order = openb_protocol.arrival_order(trace, 42)
    assert 1.3 * 6_212_000 - 8000 < _asked(trace, order) <= 1.3 * 6_212_000
