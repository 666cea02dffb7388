"""The table of a comparison: means over seeds, and no number cut short, however narrow the terminal."""

import pytest
from tests.builders.replay import build_scene, build_trace_node, build_trace_task

from eelgrid_controller.cli.replay import policy_means, print_comparison
from eelgrid_controller.replay.policy_comparison import TimedScenario, execute_run, list_runs, times_summary
from eelgrid_controller.replay.simulation import Outage
from eelgrid_controller.replay.trace_loading import LoadedTrace

NODES = (build_trace_node("n0"), build_trace_node("n1", model="A100"))
TASKS = tuple(build_trace_task(f"t{i:02d}", 10.0 * i, 5000.0 + 100 * i, gpus=1 + i % 2) for i in range(6))


@pytest.fixture(scope="module")
def compared():
    small = build_scene(NODES, TASKS)
    how = TimedScenario(small.trace, small.schedule, small.schedule.end_s, (Outage(0, 900.0, 1900.0),), None, 1.25)
    runs = [execute_run(job) for job in list_runs(how, ("fgd", "pwr200", "eelgrid"), (42, 43))]
    return how, times_summary("small", runs)


def test_means_are_over_seeds(compared):
    _, table = compared
    rows = policy_means(table)
    assert [(row["policy"], row["seeds"]) for row in rows] == [("fgd", 2), ("pwr200", 2), ("eelgrid", 2)]
    column = table.columns.index("energy_kwh")
    for row, (first, second) in zip(rows, zip(table.rows[::2], table.rows[1::2], strict=True), strict=True):
        assert row["energy_kwh"] == (first[column] + second[column]) / 2
        assert "seed" not in row


@pytest.mark.parametrize("width", [200, 100, 60, 20])
def test_every_number_is_whole(compared, capsys, width):
    how, table = compared
    print_comparison(LoadedTrace("small", NODES, TASKS, "here"), how, table, width)
    printed = capsys.readouterr().out
    assert "…" not in printed
    lines = [line.split() for line in printed.splitlines()]
    across = width < 200
    energies = [f"{row['energy_kwh']:.2f}" for row in policy_means(table)]
    if across:
        assert ["energy", "kWh", *energies] in lines
        assert ["policy", "fgd", "pwr200", "eelgrid"] in lines
    else:
        assert [line[1] for line in lines if line[:1] in (["fgd"], ["pwr200"], ["eelgrid"])] == energies
    assert "restarts" in printed
    assert "cost" not in printed, "there was no tariff"
    assert "small: 6 tasks; here" in printed
    assert "PUE 1.25" in printed
