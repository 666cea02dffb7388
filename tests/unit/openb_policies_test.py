"""The policies by name; and, where the published trace lies, that they allocate what their authors published."""

import csv
import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from bench.openb import traces
from bench.openb.published import plain_policy

from eelgrid_controller.replay import openb_protocol
from eelgrid_kernels import baselines, simulation

DATA = Path(os.environ.get("EELGRID_DATA", Path(__file__).parents[2].parent / "shared" / "data")) / "openb"
PUBLISHED = DATA / "published" / "fgd_allocation.csv"


def test_every_listed_name_is_a_policy_of_its_own():
    found = [baselines.find_policy(name) for name in baselines.policy_names()]
    assert [policy.name for policy in found] == list(baselines.policy_names())
    assert len({(policy.code, *policy.weights) for policy in found}) == len(found)


def test_any_mix_of_pwr_and_fgd_has_a_name():
    mixed = baselines.find_policy("pwr137")
    assert (mixed.code, mixed.weights.tolist()) == (baselines.MIX, [137.0, 863.0])
    assert baselines.find_policy("fgd").weights.tolist() == [0.0, 1000.0]
    assert baselines.find_policy("pwr").weights.tolist() == [1000.0, 0.0]


@pytest.mark.parametrize("name", ["", "FGD", "pwr0", "pwr1000", "pwr-1", "pwr05", "pwr٣", "pwr20 "])
def test_a_name_that_is_none_is_refused_with_the_names_that_are(name):
    with pytest.raises(ValueError, match=r"gpupacking.*pwrA with A from 1 to 999"):
        baselines.find_policy(name)


@cache
def published():
    rows = csv.DictReader(PUBLISHED.read_text().splitlines())
    return [
        (
            row["workload"].removeprefix("openb_pod_list_"),
            plain_policy(row["sc_policy"]),
            int(row["seed"]),
            float(row["100"]),
            float(row["130"]),
        )
        for row in rows
    ]


@cache
def trace(name):
    return traces.load_trace(DATA, name)


def allocated_pct(of, name, seed):
    """Percent of GPU capacity allocated when 100 % and 130 % have arrived."""
    policy, order = baselines.find_policy(name), openb_protocol.arrival_order(of, seed)
    rank = openb_protocol.node_order(of, seed)
    empty = simulation.build_empty_engine(of.fleet, of.specs, of.typical, rank, policy)
    ran = simulation.simulate_arrivals(empty, order)
    full = int(np.searchsorted(ran.arrived_milli, of.fleet.gpu_milli, side="right")) - 1
    return [100 * int(ran.allocated_milli[moment]) / of.fleet.gpu_milli for moment in (full, -1)]


@pytest.mark.skipif(not PUBLISHED.is_file(), reason=f"no published results in {DATA}; set EELGRID_DATA")
@pytest.mark.parametrize(
    ("name", "workload", "seeds", "within_pp"),
    [
        ("fgd", "default", 10, 0.2),
        ("fgd", "gpuspec33", 10, 0.2),
        *((name, "gpushare100", 4, 0.7) for name in ("random", "dotprod", "gpupacking", "gpuclustering", "bestfit")),
    ],
)
def test_a_peer_allocates_what_was_published(name, workload, seeds, within_pp):
    theirs = [row for row in published() if row[:2] == (workload, name)][:seeds]
    assert len(theirs) == seeds
    ours = np.mean([allocated_pct(trace(workload), name, row[2]) for row in theirs], axis=0)
    assert ours == pytest.approx(np.mean([row[3:] for row in theirs], axis=0), abs=within_pp)
