"""Gangs and thieves, leaders that are killed, an API server that is killed: what must hold, measured.

Each trial says what it saw as rows of (measure, value, baseline); a row of zeros and ones
is 1 where it held.
"""

import asyncio
import time
from collections.abc import Callable

from bench.kubernetes.control_plane import ControlPlane
from bench.kubernetes.processes import ControllerProcess
from bench.kubernetes.rig import Rig, Seen, pod
from eelgrid_controller.engines.kubernetes.api.election import record_of
from eelgrid_controller.engines.kubernetes.api.errors import ClusterError
from eelgrid_controller.engines.kubernetes.api.port import LEASES, NODES, POD_GROUPS, PODS, REPLICA_SETS
from eelgrid_controller.engines.kubernetes.model.well_known import (
    ANNOTATION_GROUP,
    ANNOTATION_GROUP_SIZE,
    LABEL_MANAGED,
)

__all__ = ["Row", "api_restart", "gang_stolen", "gang_waits", "leaders_killed"]

Row = tuple[str, float, float | str]
_POOL = "bench.eelgrid.io/pool"
_SIZE = 4


async def _pool(rig: Rig, name: str, count: int) -> list[str]:
    nodes = await rig.make_nodes(count, prefix=f"{name}-")
    for node in nodes:
        await rig.cluster.patch(NODES, node, {"metadata": {"labels": {_POOL: name}}})
    return nodes


async def _gang(rig: Rig, name: str, pool: str, *, is_grouped: bool) -> None:
    """A ReplicaSet of four pods of a whole node each; by a PodGroup, or by annotations alone."""
    spec = {"nodeSelector": {_POOL: pool}}
    notes = {}
    if is_grouped:
        spec["schedulingGroup"] = {"podGroupName": name}
        body = {"metadata": {"name": name}, "spec": {"schedulingPolicy": {"gang": {"minCount": _SIZE}}}}
        await rig.cluster.create(POD_GROUPS, body, namespace=rig.namespace)
    else:
        notes = {ANNOTATION_GROUP: name, ANNOTATION_GROUP_SIZE: str(_SIZE)}
    template = pod("", gpus=8, annotations=notes, labels={"gang": name, LABEL_MANAGED: "true"}, spec=spec)
    del template["metadata"]["name"]
    body = {
        "metadata": {"name": name},
        "spec": {"replicas": _SIZE, "selector": {"matchLabels": {"gang": name}}, "template": template},
    }
    await rig.cluster.create(REPLICA_SETS, body, namespace=rig.namespace)


async def _no_gang(rig: Rig, name: str) -> None:
    await rig.cluster.delete(REPLICA_SETS, name, namespace=rig.namespace)
    await rig.clear()


def _bound(rig: Rig, prefix: str) -> list[Seen]:
    return [one for one in rig.alive() if one.name.startswith(prefix) and one.bound_s is not None]


async def gang_waits(rig: Rig, *, is_grouped: bool) -> list[Row]:
    """Four whole nodes are asked for and three are there; then a fourth comes."""
    how = "podgroup" if is_grouped else "annotations"
    pool, name = f"wait-{how}", f"gang-wait-{how}"
    await _pool(rig, pool, _SIZE - 1)
    await _gang(rig, name, pool, is_grouped=is_grouped)
    await asyncio.sleep(6.0)
    early = len(_bound(rig, name))
    start_s = time.monotonic()
    await _pool(rig, pool, _SIZE)
    await rig.until(lambda: len(_bound(rig, name)) == _SIZE, within_s=60.0)
    bound = _bound(rig, name)
    took_s = max((one.bound_s or 0.0 for one in bound), default=start_s) - start_s
    planned = sum(one.node == one.pinned for one in bound)
    await _no_gang(rig, name)
    return [
        (f"gang_{how}_bound_with_three_nodes", early, 0),
        (f"gang_{how}_bound_with_four_nodes", len(bound), _SIZE),
        (f"gang_{how}_on_planned_nodes", planned, _SIZE),
        (f"gang_{how}_seconds_after_fourth_node", round(took_s, 2), "-"),
    ]


async def gang_stolen(rig: Rig, plane: ControlPlane, *, is_grouped: bool) -> list[Row]:
    """One of four places is taken between the plan and its binding, while kube-scheduler is away."""
    how = "podgroup" if is_grouped else "annotations"
    pool, name = f"steal-{how}", f"gang-steal-{how}"
    await _pool(rig, pool, _SIZE + 1)
    plane.stop_scheduler()
    try:
        await _gang(rig, name, pool, is_grouped=is_grouped)
        pinned = lambda: [one for one in rig.alive() if one.name.startswith(name) and one.pinned]  # noqa: E731
        await rig.until(lambda: len(pinned()) == _SIZE, within_s=60.0)
        first = {one.uid for one in pinned()}
        stolen = pinned()[0].pinned
        await rig.make([pod("thief", mode="alone", spec={"nodeName": stolen})])
    finally:
        plane.start_scheduler()
    start_s = time.monotonic()
    partial = 0
    while time.monotonic() - start_s < 6.0:
        partial = max(partial, sum(one.uid in first for one in _bound(rig, name)))
        await asyncio.sleep(0.1)
    whole = lambda: len([one for one in _bound(rig, name) if one.uid not in first]) == _SIZE  # noqa: E731
    await rig.until(whole, within_s=120.0)
    bound = [one for one in _bound(rig, name) if one.uid not in first]
    took_s = max((one.bound_s or 0.0 for one in bound), default=start_s) - start_s
    planned = sum(one.node == one.pinned != stolen for one in bound)
    await _no_gang(rig, name)
    return [
        (f"gang_{how}_bound_while_stolen", partial, 0),
        (f"gang_{how}_bound_after_theft", len(bound), _SIZE),
        (f"gang_{how}_on_planned_nodes_after_theft", planned, _SIZE),
        (f"gang_{how}_seconds_from_theft_to_all_bound", round(took_s, 1), "-"),
    ]


async def leaders_killed(
    rig: Rig, start: Callable[[str], ControllerProcess], *, times: int, lease_s: float, batch: int = 20
) -> list[Row]:
    """The leader is killed in the middle of a batch, again and again; a standby takes over."""
    sides = [start("one"), start("two")]
    for side in sides:
        await side.start()
    late, slowest_s, made = 0, 0.0, 0
    everything: dict[str, Seen] = {}
    for turn in range(times):
        holder = await _holder(rig)
        leader = next((side for side in sides if side.name == holder), sides[0])
        names = {f"k{turn:02d}-{index:03d}" for index in range(batch)}
        making = asyncio.create_task(rig.make(pod(name) for name in sorted(names)))
        await asyncio.sleep(0.15)
        start_s = time.monotonic()
        await leader.kill()
        await making
        made += batch
        is_there = lambda names=names: names <= {one.name for one in rig.alive() if one.bound_s}  # noqa: E731
        in_time = await rig.until(is_there, within_s=2.0 * lease_s + 60.0)
        took_s = max((one.bound_s or 0.0 for one in rig.alive() if one.name in names), default=0.0) - start_s
        slowest_s = max(slowest_s, took_s)
        late += not in_time or took_s > 2.0 * lease_s
        everything |= rig.seen
        await leader.start()
    twice = sum(one.plans > 1 for one in everything.values())
    astray = sum(one.node != one.pinned for one in everything.values() if one.bound_s)
    held: dict[str, int] = {}
    for one in rig.alive():
        held[one.node] = held.get(one.node, 0) + 1
    for side in sides:
        await side.stop()
    await rig.clear()
    return [
        ("leaders_killed", times, "-"),
        ("leaders_killed_pods_bound", sum(bool(one.bound_s) for one in everything.values()), made),
        ("leaders_killed_pods_planned_twice", twice, 0),
        ("leaders_killed_pods_astray", astray, 0),
        ("leaders_killed_nodes_overbooked", sum(many > 8 for node, many in held.items() if node), 0),
        ("leaders_killed_slower_than_two_leases", late, 0),
        ("leaders_killed_slowest_seconds", round(slowest_s, 1), 2.0 * lease_s),
    ]


async def api_restart(rig: Rig, plane: ControlPlane, *, count: int = 200) -> list[Row]:
    """The API server is killed in the middle of a burst and started again three seconds later."""
    await rig.make(pod(f"r{index:04d}") for index in range(count // 2))
    command = plane.kill_api_server()
    start_s = time.monotonic()
    await asyncio.sleep(3.0)
    plane.start_api_server(command)
    await _answers(rig)
    back_s = time.monotonic() - start_s
    await rig.make(pod(f"r{index:04d}") for index in range(count // 2, count))
    await rig.until(lambda: len(_bound(rig, "r")) == count, within_s=180.0)
    bound = _bound(rig, "r")
    took_s = max((one.bound_s or 0.0 for one in bound), default=start_s) - start_s
    rows: list[Row] = [
        ("api_restart_pods_bound", len(bound), count),
        ("api_restart_pods_on_planned_nodes", sum(one.node == one.pinned for one in bound), count),
        ("api_restart_pods_planned_twice", sum(one.plans > 1 for one in bound), 0),
        ("api_restart_seconds_away", round(back_s, 1), "-"),
        ("api_restart_seconds_to_all_bound", round(took_s, 1), "-"),
    ]
    await rig.clear()
    return rows


async def _answers(rig: Rig) -> None:
    async with asyncio.timeout(120.0):
        while True:
            try:
                await rig.cluster.list(PODS, namespace=rig.namespace, limit=1)
            except ClusterError:
                await asyncio.sleep(0.2)
            else:
                return


async def _holder(rig: Rig) -> str:

    return record_of(await rig.cluster.get(LEASES, "eelgrid-controller", namespace="default")).holder
