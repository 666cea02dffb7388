"""Reads nodes, free GPUs and power draw from the core and telemetry for one control cycle.

Cluster-wide sums are read in batches so that the event loop is not blocked, and are cached for a short time.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from eelgrid_controller.clock import Clock
from eelgrid_controller.core.core import Core
from eelgrid_controller.objectives.observation import GpuCounters, NodeObservation, ObservedNode
from eelgrid_controller.objectives.policy_budgets import NodePowerDraw
from eelgrid_controller.placement.gpu_power import find_power_limit_range
from eelgrid_controller.state.node_allocations import NodeRecord
from eelgrid_controller.state.policy import is_pool_enforced
from eelgrid_controller.state.telemetry import Telemetry
from eelgrid_protos.catalogue.loader import Catalogue
from eelgrid_protos.messages import Inventory, Policy, Reading, Workload


def observe_node(record: NodeRecord) -> ObservedNode:
    """A node as the core has it."""
    return ObservedNode(record.inventory, record.is_ready, frozenset(record.lost_gpus))


def node_readings(telemetry: Telemetry, inventory: Inventory, *, now_s: float, now_ns: int) -> NodeObservation:
    """Fresh counters and limits of a node's GPUs; what is missing is left out."""
    name = inventory.node_name
    applied = telemetry.plan_applied(name)
    tick = telemetry.fresh_tick(name, now_s=now_s, now_ns=now_ns)
    if tick is None:
        return NodeObservation({}, {}, applied, None)
    energies = tick.gpus.get(Reading.ENERGY_J, ())
    limits = tick.gpus.get(Reading.POWER_LIMIT_W, ())
    looks, limits_w = {}, {}
    for position, gpu in enumerate(inventory.gpus):
        limit_w = limits[position] if position < len(limits) else None
        energy_j = energies[position] if position < len(energies) else None
        if limit_w is not None:
            limits_w[gpu.uuid] = limit_w
            if energy_j is not None:
                looks[gpu.uuid] = GpuCounters(tick.time_ns / 1e9, energy_j, limit_w)
    return NodeObservation(looks, limits_w, applied, telemetry.age_s(name, now_s=now_s, now_ns=now_ns))


def unmanaged_draw(core: Core, name: str, unsteered: Container[str], catalogue: Catalogue) -> NodePowerDraw:
    """What the GPUs of a node may draw that no steered job holds."""
    state = core.state
    record = state.nodes[name]
    total_w = 0.0  # also of a node that is lost: what runs there runs on
    for gpu in record.inventory.gpus:
        board, product = find_power_limit_range(gpu, catalogue), catalogue.products.get(gpu.catalogue_key)
        default_w = board.default_w if board is not None else gpu.power_limit_max_w or 0.0
        if gpu.lost or gpu.uuid in record.lost_gpus:
            continue
        holders = [state.workloads[key] for key in record.holders(gpu.uuid)]
        if any(one.spec.training is not None and one.workload_id not in unsteered for one in holders):
            continue
        if not holders:
            total_w += default_w if product is None else min(default_w, product.idle_w)
        else:
            limits = [one.power_limit_w for one in holders]
            total_w += max(default_w if limit_w is None else limit_w for limit_w in limits)
    return NodePowerDraw(record.inventory, total_w)


def node_power(telemetry: Telemetry, inventory: Inventory, *, now_s: float, now_ns: int) -> tuple[float, int]:
    """What the GPUs of a node were read to draw, and how many of them were not read."""
    tick = telemetry.fresh_tick(inventory.node_name, now_s=now_s, now_ns=now_ns)
    found = () if tick is None else tick.gpus.get(Reading.POWER_W, ())
    read = [power_w for power_w in found[: len(inventory.gpus)] if power_w is not None]
    return sum(read), len(inventory.gpus) - len(read)


def free_gpus(core: Core, name: str) -> dict[str, int]:
    """GPUs of a node that nobody holds, by model; none of a node that is lost or may not be changed."""
    state = core.state
    record = state.nodes[name]
    found: dict[str, int] = {}
    if not record.is_ready or not is_pool_enforced(state.policy, record.inventory.pool):
        return found
    taken = record.externally_used_gpus() | record.lost_gpus
    for gpu in record.inventory.gpus:
        usable = not (gpu.lost or gpu.cordon or gpu.mig_enabled or gpu.uuid in taken)
        if usable and gpu.uuid not in record.gpu_milli:
            found[gpu.model] = found.get(gpu.model, 0) + 1
    return found


_Result = TypeVar("_Result")
_SLICE = 256  # workloads or nodes that are read in one go: about a millisecond


class CoreReader(Protocol):
    """What is needed of the controller's loop."""

    async def read(self, view: Callable[[Core], _Result]) -> _Result:
        """What `view` makes of the core."""


def iter_batches(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """So many at a time as are read in a millisecond."""
    for start in range(0, len(names), _SLICE):
        yield names[start : start + _SLICE]


class ClusterSums:
    """Remembers when each sum was made last."""

    def __init__(
        self, loop: CoreReader, telemetry: Telemetry, catalogue: Catalogue, *, every_s: float, clock: Clock
    ) -> None:
        self._loop, self._telemetry, self._catalogue = loop, telemetry, catalogue
        self._every_s, self._clock, self._monotonic_s = every_s, clock, clock.monotonic_s
        self._policy_seen = -1
        self._drawn_s = self._freed_s = float("-inf")

    async def node_draws_if_due(self, policy: Policy, unsteered: Container[str]) -> tuple[NodePowerDraw, ...] | None:
        """What is not steered may draw so much; None while that was summed a moment ago."""
        now_s = self._monotonic_s()
        if policy.revision == self._policy_seen and (not policy.budgets or now_s - self._drawn_s < self._every_s):
            return None
        self._policy_seen, self._drawn_s = policy.revision, now_s
        return await self.node_draws(unsteered) if policy.budgets else ()

    async def node_draws(self, unsteered: Container[str]) -> tuple[NodePowerDraw, ...]:
        """The same of every node, now."""
        made: list[NodePowerDraw] = []
        for names in iter_batches(await self._loop.read(lambda core: list(core.state.nodes))):
            found = await self._loop.read(
                lambda core, names=names: [
                    unmanaged_draw(core, name, unsteered, self._catalogue) for name in names if name in core.state.nodes
                ]  # type: ignore[misc]
            )
            now_s, now_ns = self._clock.monotonic_s(), self._clock.now_ns()
            for draw in found:
                power_w, unread = node_power(self._telemetry, draw.inventory, now_s=now_s, now_ns=now_ns)
                made.append(draw._replace(power_w=power_w, unread=unread))
            await asyncio.sleep(0)
        return tuple(made)

    async def free_gpus_if_due(self, workloads: Iterable[Workload]) -> dict[str, int] | None:
        """GPUs that elastic jobs could have, by model; None while that was counted a moment ago."""
        now_s = self._monotonic_s()
        is_wanted = any(one.spec.training is not None and one.spec.training.is_elastic for one in workloads)
        if not is_wanted or now_s - self._freed_s < self._every_s:
            return None
        self._freed_s = now_s
        total = Counter[str]()
        names = await self._loop.read(lambda core: [] if len(core.state.pending) else list(core.state.nodes))
        for some in iter_batches(names):
            parts = await self._loop.read(
                lambda core, some=some: [free_gpus(core, name) for name in some if name in core.state.nodes]  # type: ignore[misc]
            )
            for found in parts:
                total.update(found)
            await asyncio.sleep(0)
        return dict(total)
