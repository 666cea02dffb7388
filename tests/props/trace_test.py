"""The openb trace through the core: twice the same, and where it is looked at, what the naive twin chooses.

The trace is found through EELGRID_DATA, by default in ../shared/data beside the
repository.
"""

import csv
import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests import naive
from tests.builders.cluster import build_core, build_naive_cluster, build_naive_task, build_node, build_request
from tests.state_invariants import check_invariants

from eelgrid_protos.messages import Weights, WorkloadPhase

ROOT = Path(__file__).resolve().parents[2]
CSV = Path(os.environ.get("EELGRID_DATA", ROOT.parent / "shared" / "data")) / "openb" / "csv"
TASKS = 1500
LOOKED_AT = (0, 40, 333, 800, 1200, 1499)
# Those that the naive twin of one decision knows; quotes depend on the whole history.
PRICES = Weights(power=1.0, fragmentation_w=80.0, stranding_w=200.0)

pytestmark = pytest.mark.skipif(not CSV.is_dir(), reason=f"no openb trace in {CSV}; set EELGRID_DATA")


def rows(name):
    with (CSV / name).open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def nodes():
    for row in rows("openb_node_list_gpu_node.csv"):
        yield build_node(
            row["sn"],
            gpus=int(row["gpu"]),
            model=row["model"],
            cpu=int(row["cpu_milli"]) // 1000,
            memory_gib=int(row["memory_mib"]) // 1024,
        )


def tasks():
    for number, row in enumerate(rows("openb_pod_list_default.csv")):
        if number == TASKS:
            return
        count = int(row["num_gpu"])
        yield build_request(
            cpu=int(row["cpu_milli"]) / 1000,
            memory_gib=int(row["memory_mib"]) // 1024,
            gpus=count,
            milli=int(row["gpu_milli"]) if count else 0,
            key=row["name"],
        )


def test_the_trace_is_placed_the_same_twice_and_as_the_naive_twin_would():
    core, again = build_core(*nodes()), build_core(*nodes())
    for each in (core, again):
        each.update_policy(replace(each.state.policy, objective="custom", weights=PRICES), now_ns=0)
    assert core.modelled_power_w() == pytest.approx(230_100, abs=50)  # The published idle watts of this cluster.
    for number, wanted in enumerate(tasks()):
        theirs = None
        if number in LOOKED_AT:
            cluster, mix, models = build_naive_cluster(core)
            prices = (PRICES.power, PRICES.fragmentation_w, PRICES.stranding_w)
            theirs = naive.best_candidates(cluster, build_naive_task(wanted.spec.request, models), mix, prices)
        step = core.submit(wanted, now_ns=number)
        assert step == again.submit(wanted, now_ns=number)
        assert step.result.phase is WorkloadPhase.PLACED
        if theirs:
            (explained,) = core.state.explanations.get(step.result.workload_id)
            assert explained.feasible_nodes == theirs.feasible
            assert [found.cost_w for found in explained.candidates] == pytest.approx(
                [found.cost_w for found in theirs.candidates], abs=1e-9
            )
            assert explained.candidates[0].node_name == step.result.placements[0].node_name
    check_invariants(core.state)
    assert core.state.digest() == again.state.digest()
