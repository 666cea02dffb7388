"""Several clusters under faults: a workload runs in one cluster at most, whatever is lost, doubled or crashes."""

import os
from dataclasses import replace

import pytest

from eelgrid_controller.federation import dispatch as rules
from eelgrid_controller.federation import dispatcher
from eelgrid_controller.federation.affinity import DependencyPlan, list_dependencies
from eelgrid_controller.federation.dispatch import CopyPhase, Verb
from eelgrid_protos.faults import DeadlineExceeded, Unavailable
from tests.sim.front import Broken, run

SEEDS = int(os.environ.get("EELGRID_SIM_SEEDS", "25"))
STEPS = 600
# A plant is given this many seeds to show itself.
PLANT_SEEDS = range(1000, 1060)


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_a_workload_runs_in_one_cluster_at_most(seed):
    await run(seed, STEPS, clusters=2 + seed % 2)


# Of 24 seeds.
LEAST = {
    "crashes": 60, "lost": 150, "doubled": 400, "moves": 2, "cuts": 90, "both": 1000, "arrays": 20, "gangs": 20,
    "dependents": 20, "repinned": 1, "held": 10,
}  # fmt: skip


async def test_the_world_is_busy():
    """Seeds that pass because nothing happens would pass for ever."""
    worlds = [await run(seed, STEPS) for seed in range(200, 224)]
    for name, least in LEAST.items():
        assert sum(world.counts[name] for world in worlds) >= least, name
    assert sum(len(world.accepted) for world in worlds) >= 50
    sites = [site for world in worlds for site in world.sites.values()]
    assert sum(len(site.marked) for site in sites) >= 15
    assert sum(len(site.placed) for site in sites) >= 60


async def test_the_same_seed_gives_the_same_world():
    first, second = await run(7, STEPS), await run(7, STEPS)
    assert (first.counts, first.disk) == (second.counts, second.disk)


def _believe_silence(now, cluster, verb, fault):
    """A chosen cluster that does not answer counts as one where nothing runs."""
    if isinstance(fault, DeadlineExceeded) and verb is Verb.RELEASE:
        ended = tuple(replace(one, phase=CopyPhase.ENDED) if one.cluster == cluster else one for one in now.copies)
        return replace(now, copies=ended, chosen="")
    return rules.record_failure(now, cluster, verb, fault)


def _forget_silent(now, cluster, verb, fault):
    """A cluster whose answer to a submission is lost counts as one that never got it."""
    if isinstance(fault, DeadlineExceeded) and verb is Verb.SUBMIT:
        copies = tuple(replace(one, phase=CopyPhase.ENDED) if one.cluster == cluster else one for one in now.copies)
        return replace(now, copies=copies)
    return rules.record_failure(now, cluster, verb, fault)


def _believe_refusal(now, cluster, verb, fault):
    """A cluster that refused a submission counts as one where nothing can start, though an earlier sending is on its way."""
    found = rules.record_failure(now, cluster, verb, fault)
    copies = tuple(
        replace(one, phase=CopyPhase.ENDED) if one.phase is CopyPhase.REFUSED else one for one in found.copies
    )
    return replace(found, copies=copies)


def _release_all(now):
    """Whoever holds it is released, without a choice on record."""
    return tuple(
        replace(call, verb=Verb.RELEASE) if call.verb is Verb.LOOK and not _is_chosen(now, call) else call
        for call in rules.plan_calls(now)
    )


def _is_chosen(now, call):
    return call.cluster == now.chosen


def _believe_release(now, cluster, verb, fault):
    """A release that was cut short counts as one that was carried out."""
    if isinstance(fault, Unavailable) and verb is Verb.RELEASE:
        copies = tuple(replace(one, phase=CopyPhase.RELEASED) if one.cluster == cluster else one for one in now.copies)
        return replace(now, copies=copies)
    return rules.record_failure(now, cluster, verb, fault)


def _meet_all(now):
    return DependencyPlan(met=tuple(one.workload_id for one in list_dependencies(now.request)))


PLANTS = {
    "a release that was cut short is believed": {"record_failure": _believe_release},
    "parts of a gang go their own ways": {"get_gang_key": lambda _: None},
    "nothing waits for what it starts after": {"resolve_dependencies": lambda now, _: _meet_all(now)},
    "a silent cluster is believed to be idle": {"record_failure": _believe_silence},
    "a refusal is believed": {"record_failure": _believe_refusal},
    "a standby is released as well": {"plan_calls": _release_all},
    "a silent cluster is forgotten": {"record_failure": _forget_silent},
}


@pytest.mark.parametrize("name", PLANTS)
async def test_a_planted_fault_is_found(name, monkeypatch):
    for attribute, plant in PLANTS[name].items():
        monkeypatch.setattr(dispatcher, attribute, plant)
    await _expect_found(name)


async def test_records_that_do_not_reach_the_disk_are_found():
    await _expect_found("a forgetful disk", forgetful=0.5)


async def _expect_found(name, **parts):
    for seed in PLANT_SEEDS:
        try:
            await run(seed, STEPS, **parts)
        except Broken:
            return
    pytest.fail(f"no seed found it: {name}")
