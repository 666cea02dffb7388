"""Advice: which nodes Slurm is to prefer and in which order it is to try jobs, by weights and site factors; nothing is held.

Owns which requests are asked about, how a rank of the core becomes a node's weight and its order of jobs their site factors, and
how both are taken back. Must not know how commands run; the core for an order is a copy that is used up.

Theory. Slurm tries the nodes of the lowest weight first, so a weight is a hint that no job can be hurt by: whatever the nodes of
rank 0 cannot take goes to the next. A job mostly starts when it comes, so the hint must be there before: the last kinds of jobs
stand for the next. For each, the core says by a dry run where it would place one; these nodes have rank 0, all others 1. A weight of ours is
the site's own plus a million for each rank, so the site's is always known again, also by a controller that begins anew.
Level-triggered: slurmctld forgets weights when it restarts, and the next look writes them again.

Where there are queues, the jobs that opted in are tried in the order of these: on a copy of the core those that run are adopted,
so that what queues and users have counts, and those that wait are submitted with all nodes closed. They exchange their own
priorities by site factors: the first in the order gets the highest of them, and none gets more than that, so no job that did not
opt in is tried later than without us. Equal priorities are told apart by one less for each that follows.

Source: slurm.conf(5), Weight; scontrol(1), SiteFactor, and "Parameters which may be updated for nodes are lost when slurmctld
restarts"; sprio(1); tried on 22.05.8.
"""

import contextlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from eelgrid_controller.core.core import Core
from eelgrid_controller.engines.slurm.answers import SlurmJob, SlurmNode
from eelgrid_controller.engines.slurm.steering import AdoptJob, parse_job_id
from eelgrid_protos.errors import ContractError
from eelgrid_protos.faults import Fault
from eelgrid_protos.messages import SubmitWorkloadRequest

RANK_WEIGHT = 1_000_000
# Kinds of jobs for which the core is asked.
KINDS_MOST = 8
# Jobs of an order that wait, and those that run.
ORDERED_MOST, RUNNING_MOST = 200, 1000
# What Slurm takes as a factor.
_FACTOR_MOST = 2_147_483_645
_WORD = re.compile(r"[A-Za-z0-9_-]+")
_OPT_IN = "eelgrid"
# What `sprio` prints of a job in the form that is asked for: its number, its priority and its site factor.
PRIORITY_FORM = "%i|%Y|%S"
_PRIORITY_LINE = re.compile(r"\s*(\d{1,12})\|\s*(\d{1,12})\|\s*(-?\d{1,12})\s*")


def select_kinds(jobs: Iterable[SlurmJob]) -> list[SlurmJob]:
    """Returns one job for each of the kinds that came last: what they ask for tells them apart, and not who asks."""
    kinds: dict[tuple[object, ...], SlurmJob] = {}
    for job in sorted(jobs, key=lambda one: (one.submit_s, one.job_id), reverse=True):
        if job.peculiar or job.required_nodes:
            continue
        kind = job.node_count, job.cpus, job.memory_bytes, job.gpus, job.partition, job.features, job.account
        if kind not in kinds and len(kinds) < KINDS_MOST:
            kinds[kind] = job
    return list(kinds.values())


def get_site_weight(node: SlurmNode) -> int | None:
    """Returns the weight that a node has without us; None for one above what we can tell from our own."""
    return node.weight % RANK_WEIGHT if node.weight < 2 * RANK_WEIGHT else None


def plan_weights(nodes: Sequence[SlurmNode], preferred: Collection[str]) -> Mapping[int, tuple[str, ...]]:
    """Returns by weight the nodes that are to have it and have another; with nothing preferred the site's own weights."""
    changes: dict[int, list[str]] = {}
    for node in nodes:
        own = get_site_weight(node)
        if own is None:
            continue
        wanted = own + RANK_WEIGHT * (bool(preferred) and node.name not in preferred)
        if wanted != node.weight:
            changes.setdefault(wanted, []).append(node.name)
    return {weight: tuple(names) for weight, names in sorted(changes.items())}


class JobPriority(NamedTuple):
    """A waiting job's priority, of which `site` is its site factor."""

    priority: int
    site: int


def parse_priorities(text: str) -> dict[str, JobPriority]:
    """Parses what sprio prints by PRIORITY_FORM; lines of other forms, such as of arrays, are left out."""
    found = map(_PRIORITY_LINE.fullmatch, text.splitlines())
    return {one[1]: JobPriority(int(one[2]), int(one[3])) for one in found if one is not None}


def allows_factors(configuration: str) -> bool:
    """Returns whether Slurm sorts jobs by factors and no plugin of the site sets theirs, by `scontrol show config`."""
    settings = {
        key.strip(): value.strip() for key, _, value in (line.partition("=") for line in configuration.splitlines())
    }
    plugin = settings.get("PrioritySiteFactorPlugin", "(null)")
    return settings.get("PriorityType") == "priority/multifactor" and plugin in {"(null)", "", "site_factor/none"}


def has_opted_in(job: SlurmJob) -> bool:
    """Returns whether a job's user has written the word into its comment, as for being steered."""
    return _OPT_IN in _WORD.findall(job.comment)


def select_ordered(jobs: Iterable[SlurmJob], now_s: float) -> tuple[list[SlurmJob], list[SlurmJob]]:
    """Returns the jobs that opted in: those that wait for their turn, the oldest of them, and those that run."""
    mine = sorted(filter(has_opted_in, jobs), key=lambda one: (one.submit_s, parse_job_id(one.job_id)))
    waiting = [
        job
        for job in mine
        if job.is_pending
        and not (job.is_held or job.peculiar or job.array_id or job.dependency)
        and job.eligible_s <= now_s
    ]
    return waiting[:ORDERED_MOST], [job for job in mine if job.holds_resources][:RUNNING_MOST]


def plan_order(
    core: Core, running: Iterable[AdoptJob], waiting: Iterable[SubmitWorkloadRequest], *, now_ns: int
) -> list[str]:
    """Returns the ids of waiting work in the order of its queues, without what the core refuses; uses up the core, a copy."""
    for one in running:
        # What cannot be adopted stays external usage.
        with contextlib.suppress(Fault, ContractError):
            core.adopt(one.request, one.adoption, now_ns=now_ns)
    for name, record in tuple(core.state.nodes.items()):
        core.update_external_usage(name, replace(record.others, closed="only the order is asked for"), now_ns=now_ns)
    mine = set[str]()
    for request in waiting:
        with contextlib.suppress(Fault, ContractError):
            mine.add(core.submit(request, now_ns=now_ns).result.workload_id)
    return [key for key in core.queues.list_order(now_ns, len(core.state.workloads)) if key in mine]


def plan_factors(
    order: Sequence[str], waiting: Collection[str], priorities: Mapping[str, JobPriority]
) -> dict[str, int]:
    """Returns by job the site factors that are to be other than they are, for an order of some of the jobs that wait.

    A job without a place in the order gets none.
    """
    own = {job: one.priority - one.site for job in order if (one := priorities.get(job)) is not None}
    wanted = dict.fromkeys((job for job in waiting if job in priorities), 0)
    least = _FACTOR_MOST
    for job, highest in zip(own, sorted(own.values(), reverse=True), strict=True):
        # 0 would hold it.
        least = max(1, min(highest, least - 1))
        wanted[job] = min(max(least - own[job], -_FACTOR_MOST), _FACTOR_MOST)
    return {job: factor for job, factor in wanted.items() if factor != priorities[job].site}
