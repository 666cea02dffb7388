"""A plan from the memory of another: the options of what did not change are kept, and come out as if found anew."""

from dataclasses import replace

import numpy as np
from scipy import sparse

from eelgrid_controller.partition import column_generation
from eelgrid_controller.partition.options import enumerate_options, remember_options
from eelgrid_controller.partition.problem import InferenceDemand, PartitionPool, PartitionProblem
from eelgrid_controller.profiles.points import Configuration, Point


def point(model, hz, latency_s, batch=1):
    how = Configuration(gpu_model=model, batch=batch)
    return Point(workload="w", configuration=how, throughput_hz=hz, latency_s={0.99: latency_s}, source="made up")


POINTS = (
    point("A", 5.0, 0.010),
    point("A", 9.0, 0.020, 2),
    point("B", 20.0, 0.030, 4),
    point("B", 12.0, 0.012, 2),
)


def problem(*services, points=POINTS):
    pools = (PartitionPool(model="A", count=None, geometry=None), PartitionPool(model="B", count=None, geometry=None))
    return PartitionProblem(services=services, points=points, pools=pools)


def service(name, rate_hz=30.0, latency_s=0.1):
    return InferenceDemand(name=name, workload="w", rate_hz=rate_hz, latency_s=latency_s, quantile=0.99)


def test_known_options_are_those_that_would_be_found():
    before = problem(service("a"), service("b", latency_s=0.03), service("c"))
    cells, options = enumerate_options(before)
    known = remember_options(before, cells, options)
    # One is gone, so that the others have other numbers; one has another rate, one is new.
    after = problem(service("b", latency_s=0.03), service("c", rate_hz=7.0), service("d", latency_s=0.05))
    assert enumerate_options(after, known=known) == enumerate_options(after)


def test_other_points_are_looked_at_again():
    before = problem(service("a"))
    known = remember_options(before, *enumerate_options(before))
    faster = tuple(replace(one, throughput_hz=2.0 * one.throughput_hz) for one in POINTS)
    after = problem(service("a"), points=faster)
    assert enumerate_options(after, known=known) == enumerate_options(after)
    assert enumerate_options(after, known=known) != enumerate_options(before)


def find_least(cost, rows, low, high):
    table, low, high = sparse.csc_array(np.array(rows)), np.array(low), np.array(high)
    return column_generation._least(np.array(cost), table, low, high, lacking=1, close=1e-5).tolist()


def test_what_parts_of_gpus_cannot_do_is_said_to_lack():
    # One GPU of a pool there is, and places for 2.4 are asked for.
    assert find_least([1.0, 1e4], [[1.0, 1.0], [1.0, 0.0]], [2.4, -np.inf], [np.inf, 1.0]) == [0, 2]
    assert find_least([1.0, 1e4], [[1.0, 1.0]], [2.4], [np.inf]) == [3, 0]


def test_whole_numbers_far_from_the_parts_are_found_as_well():
    # 10 x = 11 y has its least whole solution at 11 and 10, whose parts are near nothing.
    rows = [[10.0, -11.0, 0.0], [1.0, 0.0, 0.0]]
    assert find_least([1.0, 1.0, 1e4], rows, [0.0, 0.5], [0.0, np.inf]) == [11, 10, 0]
