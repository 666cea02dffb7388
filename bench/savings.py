"""Cost and result of the comparison with plain best fit: `python -m bench.savings --data DIR --out DIR`.

Owns the scenario and the clock. The openb nodes join a core; tasks drawn from the whole trace
fill them to a share of their GPUs, then leave and arrive at that share. The core decides each, and
`Savings` follows its events, timed separately by CPU time of the thread. `begun anew` is the
comparison that a restart would make at the end of the same scenario, from the state only.
"""

import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click

from bench.openb.traces import csv_folder
from bench.processes import resident_mib
from bench.runner import Options, benchmark, data_option
from bench.tables import format_table, write_csv
from eelgrid_controller.core.core import Core
from eelgrid_controller.energy.savings import BEST_FIT, BOTH, EELGRID, InitialCluster, PlacementSavings
from eelgrid_controller.placement.power import PriorPowerModel
from eelgrid_controller.replay import openb
from eelgrid_controller.replay.openb import NODE_LIST, openb_product_key, task_list_name
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.events import Event
from eelgrid_protos import catalogue
from eelgrid_protos.messages import Gpu, Inventory

_SHARES = (0.2, 0.4, 0.6, 0.8, 0.95)
# A controller makes a turn each second; ten arrivals and departures a second are a busy cluster.
_STEPS_A_TURN = 10
_MINUTE_NS = 60_000_000_000


class Row(NamedTuple):
    """One course; GPUs are those held, watts are modelled."""

    share_pct: int
    tasks: int
    saved_w: float
    saved_pct: float
    anew_saved_pct: float
    gpus_both: float
    gpus_here_alone: float
    gpus_best_fit_alone: float
    core_us: float
    follow_us: float
    ratio: float
    anew_s: float
    anew_mib: float  # resident, that the comparison made anew added


def inventories(folder: Path) -> Iterator[Inventory]:
    """The trace's nodes."""
    products = catalogue.load_catalogue().products
    for row in openb.read_nodes(folder / NODE_LIST):
        key = openb_product_key(row.gpu_model, products) if row.gpu_count else ""
        gpus = (
            Gpu(uuid=f"GPU-{row.name}-{index}", index=index, product=key, model=row.gpu_model, catalogue_key=key)
            for index in range(row.gpu_count)
        )
        yield Inventory(node_name=row.name, cpu_milli=row.cpu_milli, memory_bytes=row.memory_bytes, gpus=tuple(gpus))


class Course:
    """A core and what follows it, each with its clock."""

    def __init__(self, folder: Path) -> None:
        self.core = Core(ClusterState(), catalogue.load_catalogue())
        self.now_ns = 1
        for inventory in inventories(folder):
            self.core.register_node(inventory, now_ns=self.now_ns)
        self.savings = PlacementSavings(self.beginning(), PriorPowerModel(catalogue.load_catalogue()).gpu)
        self.core_s = self.follow_s = 0.0
        self.tasks = self.steps = 0

    def beginning(self) -> InitialCluster:
        """The state of now."""
        return InitialCluster.from_state(self.core.state, self.now_ns)

    def submit(self, task: openb.TraceTask) -> str:
        """One arrival."""
        self.now_ns += _MINUTE_NS
        self.tasks += 1
        began_s = time.thread_time()
        step = self.core.submit(openb.submission_of_task(task, prefix=f"{self.tasks}-"), now_ns=self.now_ns)
        self.core_s += time.thread_time() - began_s
        self._follow(step.events)
        return step.result.workload_id

    def cancel(self, key: str) -> None:
        """One departure."""
        self.now_ns += _MINUTE_NS
        began_s = time.thread_time()
        events = self.core.cancel(key, now_ns=self.now_ns).events
        self.core_s += time.thread_time() - began_s
        self._follow(events)

    def _follow(self, events: tuple[Event, ...]) -> None:
        began_s = time.thread_time()
        for event in events:
            self.savings.follow_event(event)
        self.steps += 1
        if self.steps % _STEPS_A_TURN == 0:
            self.savings.advance_to(self.now_ns)
        self.follow_s += time.thread_time() - began_s


def run(folder: Path, share: float, churn: int, seed: int) -> Row:
    """Fill to a share of the GPUs, then let tasks leave and come."""
    course, rng = Course(folder), random.Random(seed)
    tasks = openb.read_tasks(folder / task_list_name("default"))
    wanted = share * 1000 * sum(len(record.inventory.gpus) for record in course.core.state.nodes.values())
    live: list[tuple[str, int]] = []
    asked = turns = 0
    while asked < wanted or turns < churn:
        task = rng.choice(tasks)
        live.append((course.submit(task), task.gpu_count * task.gpu_milli))
        asked += live[-1][1]
        turns += asked >= wanted
        while asked > wanted:
            place = rng.randrange(len(live))
            live[place], live[-1] = live[-1], live[place]
            key, milli = live.pop()
            asked -= milli
            course.cancel(key)
    course.savings.advance_to(course.now_ns)
    figures = course.savings.figures()
    began_s, began_mib = time.thread_time(), resident_mib()
    second = PlacementSavings(course.beginning(), PriorPowerModel(catalogue.load_catalogue()).gpu)
    anew_s, anew_mib = time.thread_time() - began_s, resident_mib() - began_mib
    anew = second.figures()
    gpus = {where: milli / 1000 for where, milli in figures.gpu_milli.items()}
    return Row(
        round(100 * share),
        course.tasks,
        figures.saved_w,
        100 * figures.saved_w / figures.power_w[BEST_FIT],
        100 * anew.saved_w / anew.power_w[BEST_FIT],
        gpus[BOTH],
        gpus[EELGRID],
        gpus[BEST_FIT],
        1e6 * course.core_s / course.tasks,
        1e6 * course.follow_s / course.tasks,
        course.follow_s / course.core_s,
        anew_s,
        anew_mib,
    )


@benchmark()
@data_option()
@click.option("--churn", default=8152, help="arrivals after the fleet is filled")
@click.option("--shares", type=float, help="Of the fleet's GPUs that tasks ask for; several with spaces between.")
@click.argument("more_shares", metavar="", type=float, nargs=-1)
@click.option("--seed", default=0)
def main(options: Options) -> None:
    """A course for each share."""
    folder = csv_folder(options.data)
    rows = []
    for share in _SHARES if options.shares is None else (options.shares, *options.more_shares):
        rows.append(run(folder, share, options.churn, options.seed))
        print(rows[-1], flush=True)
    write_csv(options.out / "savings.csv", Row._fields, rows)
    print(format_table(Row._fields, [[f"{value:.4g}" for value in row] for row in rows], 0))


if __name__ == "__main__":
    sys.exit(main())
