"""Drawn mixes: proportions in their ranges, lists that keep to them, and what is told of a comparison."""

from dataclasses import replace

import pytest
from bench.openb import mix_comparison, mixes
from bench.openb.mix_comparison import MixRow

from eelgrid_controller.replay.csv_reader import TraceMalformed
from eelgrid_controller.replay.openb import TraceTask


def _task(name, gpus, milli, models=()):
    return TraceTask(
        name=name, cpu_milli=1000, memory_bytes=0, gpu_count=gpus, gpu_milli=milli, gpu_models=models, qos="LS"
    )


BASE = [
    _task("cpu", 0, 0),
    _task("eight", 8, 1000),
    _task("share", 1, 300),
    _task("whole", 1, 1000),
]
NAMING = [_task("a", 1, 1000, ("T4",)), _task("b", 8, 1000, ("G2", "G3")), _task("c", 1, 1000)]


def pools_of(tasks):
    return mixes.build_pools(BASE, NAMING)._replace(tasks=tasks)


def test_proportions_fill_their_ranges_and_depend_on_seed_and_number_alone():
    drawn = [mixes.draw_proportions(3, number) for number in range(500)]
    for column, most in zip(zip(*drawn, strict=True), (0.6, 0.5, 1.0, 0.4), strict=True):
        assert 0.0 <= min(column) < 0.02 * most
        assert 0.98 * most < max(column) <= most
        assert sum(column) / len(column) == pytest.approx(most / 2, abs=0.05 * most)
    assert mixes.draw_proportions(3, 7) == drawn[7]
    assert mixes.draw_proportions(4, 7) != drawn[7]


def test_a_list_has_the_proportions_that_it_was_drawn_by():
    wanted = mixes.Proportions(0.4, 0.3, 0.6, 0.2)
    tasks = mixes.draw_tasks(pools_of(20_000), wanted, 1, 0)
    assert len({task.name for task in tasks}) == 20_000
    gpu = [task for task in tasks if task.gpu_count]
    one = [task for task in gpu if task.gpu_count == 1]
    assert 1 - len(gpu) / len(tasks) == pytest.approx(0.4, abs=0.02)
    assert 1 - len(one) / len(gpu) == pytest.approx(0.3, abs=0.02)
    assert sum(task.gpu_milli < 1000 for task in one) / len(one) == pytest.approx(0.6, abs=0.02)
    assert sum(bool(task.gpu_models) for task in gpu) / len(gpu) == pytest.approx(0.2, abs=0.02)
    assert {task.gpu_models for task in one} == {(), ("T4",)}
    assert {task.gpu_models for task in gpu if task.gpu_count == 8} == {(), ("G2", "G3")}
    assert not any(task.gpu_models for task in tasks if not task.gpu_count)
    assert mixes.draw_tasks(pools_of(20_000), wanted, 1, 0) == tasks
    assert mixes.draw_tasks(pools_of(20_000), wanted, 1, 1) != tasks


def test_tasks_with_a_number_of_gpus_for_which_no_task_names_models_name_none():
    pools = mixes.build_pools([*BASE[:1], replace(BASE[1], gpu_count=4), *BASE[2:]], NAMING)._replace(tasks=400)
    tasks = mixes.draw_tasks(pools, mixes.Proportions(0.0, 1.0, 0.0, 1.0), 1, 0)
    assert {(task.gpu_count, task.gpu_models) for task in tasks} == {(4, ())}


@pytest.mark.parametrize("missing", range(4))
def test_a_list_without_one_sort_of_task_is_refused(missing):
    with pytest.raises(TraceMalformed, match="has no task with"):
        mixes.build_pools(BASE[:missing] + BASE[missing + 1 :], NAMING)


def test_the_summary_counts_the_mixes_that_miss_a_target():
    row = MixRow(0, mixes.Proportions(0.1, 0.2, 0.3, 0.4), 90.0, "pwr", 88.0, 12.0, 90.5, 13.0, 12.5, 50.0)
    rows = [row, row._replace(alloc_pct=89.95), row._replace(alloc_pct=89.8, per_gpu_pct=11.0)]
    allocation, saving = mix_comparison.summarize(rows).splitlines()
    assert "mean +0.08" in allocation
    assert "worst -0.20, best +0.50; below -0.1 on 1 of 3 mixes" in allocation
    assert "worst -1.00, best +0.50; below 0 on 1 of 3 mixes" in saving
