"""Advice: which nodes Slurm is to prefer, by the weights that it sorts them by; nothing is held.

Owns which requests are asked about, and how a rank of the core becomes a node's weight and is taken back. Must not know how
commands run, nor the core; placements come as arguments.

Theory. Slurm tries the nodes of the lowest weight first, so a weight is a hint that no job can be hurt by: whatever the nodes of
rank 0 cannot take goes to the next. A job mostly starts when it comes, so the hint must be there before: the last kinds of jobs
stand for the next. For each, the core says by a dry run where it would place one; these nodes have rank 0, all others 1. A weight of ours is
the site's own plus a million for each rank, so the site's is always known again, also by a controller that begins anew.
Level-triggered: slurmctld forgets weights when it restarts, and the next look writes them again.

Source: slurm.conf(5), Weight; scontrol(1), "Parameters which may be updated for nodes are lost when slurmctld restarts".
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from eelgrid_controller.engines.slurm.answers import SlurmJob, SlurmNode

RANK_WEIGHT = 1_000_000
# Kinds of jobs for which the core is asked.
KINDS_MOST = 8


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
