"""The cluster drawn: shades, bars, the map on any screen, and the demo's plain lines."""

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tests.fakes.operators import a_node

from eelgrid_controller.cli import terminal_rendering
from eelgrid_controller.demo.display import DemoView, NodeMap
from eelgrid_controller.formatting import describe_start
from eelgrid_controller.replay.submitter import SubmitReport
from eelgrid_controller.replay.trace_loading import synthesize_openb
from eelgrid_protos.messages import (
    ModelSummary,
    Placement,
    ReasonCount,
    ResourceRequest,
    Summary,
    Workload,
    WorkloadPhase,
    WorkloadSpec,
)

SUMMARY = Summary(
    time_ns=1,
    nodes_ready=1213,
    nodes_lost=2,
    gpus=6212,
    allocated_gpu_milli=3_106_000,
    placed=4000,
    pending=9,
    pending_reasons=tuple(ReasonCount(reason=f"reason {i}", workloads=9 - i) for i in range(7)),
    modelled_power_w=700_000.0,
    measured_power_w=500_000.0,
    measured_gpus=6212,
    models=(ModelSummary(model="G2", gpus=4392, allocated_gpu_milli=2_196_000, measured_power_w=1.0),),
)


def text_of(thing, width=110):
    console = Console(width=width, file=io.StringIO(), record=True, no_color=True)
    console.print(thing)
    return console.export_text()


@given(st.floats(0, 1), st.integers(1, 60))
def test_a_bar_is_as_wide_as_asked(share, width):
    assert len(terminal_rendering.render_bar(share, width)) == width


@pytest.mark.parametrize(("share", "text"), [(0, "····"), (0.5, "██··"), (1, "████"), (1.5, "████"), (-1, "····")])
def test_bars(share, text):
    assert terminal_rendering.render_bar(share, 4).plain == text


@pytest.mark.parametrize(
    ("share", "cell"), [(0.0, "·"), (0.01, "░"), (0.3, "░"), (0.5, "▒"), (0.7, "▓"), (0.99, "▓"), (1.0, "█")]
)
def test_shades(share, cell):
    drawn = text_of(terminal_rendering.render_fleet_map({"G2": [share]}, width=40, rows_most=3))
    assert drawn.split()[:3] == ["G2", "1", cell]


@settings(deadline=None)  # a loaded machine may be slow once
@given(st.integers(1, 2000), st.integers(1, 500), st.integers(40, 200), st.integers(2, 40))
def test_the_map_fits_the_screen(first, second, width, rows_most):
    drawn = text_of(
        terminal_rendering.render_fleet_map(
            {"G2": [0.5] * first, "T4": [0.0] * second}, width=width, rows_most=rows_most
        ),
        width,
    )
    lines = drawn.splitlines()
    assert max(map(len, lines)) <= width
    assert len([line for line in lines if "▒" in line or "·" in line]) <= rows_most + 3


def test_a_small_fleet_has_a_cell_for_each_node():
    drawn = text_of(terminal_rendering.render_fleet_map({"G2": [1.0] * 7, "T4": [0.0] * 3}, width=60, rows_most=4))
    assert drawn.splitlines()[0].count("█") == 7
    assert "each cell is a node" in drawn


def test_the_summary_in_figures():
    drawn = text_of(
        terminal_rendering.render_summary(SUMMARY, "title", terminal_rendering.render_pending_reasons(SUMMARY))
    )
    for piece in (
        "1,213 ready, 2 lost",
        "50.0 %",
        "700.0 kW",
        "225.4 W",
        "4,000 placed",
        "9  reason 0",
        "for other reasons",
    ):
        assert piece in drawn


def test_an_empty_cluster_is_drawn_too():
    empty = Summary(time_ns=0)
    drawn = text_of(
        terminal_rendering.render_summary(
            empty, "t", terminal_rendering.render_pending_reasons(empty), terminal_rendering.select_busiest_nodes([], 5)
        )
    )
    assert "nothing waits" in drawn
    assert text_of(terminal_rendering.render_fleet_map({}, width=80, rows_most=5))


def test_busiest_nodes_first():
    nodes = [a_node("calm", power_w=10.0), a_node("hot", power_w=300.0), a_node("dark", gpus=0)]
    lines = text_of(terminal_rendering.select_busiest_nodes(nodes, 2)).splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["hot", "calm"]


def placed(node, indexes, milli):
    request = ResourceRequest(gpu_count=len(indexes), gpu_milli=milli)
    place = Placement(replica=0, node_name=node, gpu_indexes=indexes)
    return Workload(
        workload_id="w", spec=WorkloadSpec(name="w", request=request), phase=WorkloadPhase.PLACED, placements=(place,)
    )


def test_the_scene_keeps_the_map_from_the_answers():
    nodes, _ = synthesize_openb()
    g2 = next(node for node in nodes if node.gpu_model == "G2")
    chart = NodeMap.of(nodes)
    assert next(iter(chart.by_model)) == "G2"
    chart.add_workload(placed(g2.name, (0, 1), 1000))
    chart.add_workload(placed(g2.name, (2,), 500))
    chart.add_workload(placed("elsewhere", (0,), 1000))
    shares = chart.shares()
    assert max(shares["G2"]) == pytest.approx(2.5 / 8)
    assert sum(map(sum, shares.values())) == pytest.approx(2.5 / 8)


def test_the_scene_in_a_pipe_prints_lines_without_control_characters():
    out = io.StringIO()
    nodes, tasks = synthesize_openb()
    console = Console(file=out, width=110, no_color=True, force_terminal=False)
    scene = DemoView(console, NodeMap.of(nodes), "generated", live=False)
    scene.start()
    scene.show_phase("starting the controller")
    for _ in range(3):
        scene._printed_s = -1e9
        scene.tick()
    scene.summary = SUMMARY
    scene.on_answer(SubmitReport(total=len(tasks), done=100, elapsed_s=0.5), None)
    scene.show_phase("placing")
    scene.tick()
    scene.stop()
    lines = out.getvalue().splitlines()
    assert lines[0] == "starting the controller"
    assert lines[1].startswith(
        "placing; 100/8152 tasks, 200/s; 1213 nodes; 50.0 % of GPUs allocated; 700.0 kW modelled"
    )
    assert len(lines) == 2
    assert "\x1b" not in out.getvalue()
    assert "100/8,152 tasks" in text_of(scene.draw())


def test_a_first_start_says_that_kernels_are_compiled_and_how_many():
    begun = "level=INFO event=something\n"
    compiling = begun + "kernels=compiling done=1/18 seconds=0 note=x\nkernels=compiling done=7/18 seconds=5 note=x\n"
    assert describe_start(begun) == "starting the controller"
    assert describe_start(compiling) == "compiling kernels, once: 7/18"
    assert describe_start(compiling + "kernels=warm seconds=9.1\n") == "starting the controller"
