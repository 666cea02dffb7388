"""Power saving of a Slurm cluster: which nodes are of one pool, what is in use, and which Slurm is to power down or up.

Owns what Slurm's states mean for sleep, and since when nodes are idle. Must not know how commands run, nor BMCs, nor clocks;
how many nodes sleep is decided by `objectives.power.power_save`.

Theory. Slurm carries out (SuspendProgram, ResumeProgram) and wakes by itself what a job needs, so a job never depends on this
controller: without it no more nodes fall asleep, and those that sleep are woken by jobs. Slurm's own timer must not decide
beside ours, so SuspendTime is a year. Nodes with the same partitions, features and hardware are one pool. Level-triggered: an
order that was lost is given again, after a while, as long as the node does not show it.

Source: slurm.schedmd.com/power_save.html; scontrol(1), NODES - SPECIFICATIONS FOR UPDATE; tried on 22.05.8.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from eelgrid_controller.engines.slurm.answers import SlurmJob, SlurmNode
from eelgrid_controller.objectives.power.power_save import (
    NodeActivity,
    NodePool,
    NodePower,
    SleepCosts,
    choose_nodes,
)

if TYPE_CHECKING:
    from eelgrid_controller.runtime.config import SlurmConfig

# States in which a node does something, or is promised to somebody (PLANNED: by the backfill scheduler).
_IN_USE = frozenset({"ALLOCATED", "MIXED", "COMPLETING", "RESERVED", "PLANNED", "MAINTENANCE", "BLOCKED"})
_GONE = (NodePower.ASLEEP, NodePower.FALLING_ASLEEP)
# How long an order may take to show before it is given again.
_ORDER_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSavingSettings:
    """The price of sleep, and what is always kept awake: nodes by name, and so many idle ones of each pool."""

    costs: SleepCosts
    warm_nodes: int = 0
    waiting_share: float | None = None
    always_on: frozenset[str] = frozenset()


def read_power_saving(wanted: "SlurmConfig") -> PowerSavingSettings | None:
    """Returns the settings that a configuration means; None if nodes of Slurm do not sleep."""
    if not wanted.power_save:
        return None
    transition_j = wanted.transition_j or 1.2 * wanted.wake_s * (wanted.idle_w - wanted.sleep_w)
    costs = SleepCosts(idle_w=wanted.idle_w, sleep_w=wanted.sleep_w, transition_j=transition_j, wake_s=wanted.wake_s)
    return PowerSavingSettings(
        costs=costs,
        warm_nodes=wanted.warm_nodes,
        waiting_share=wanted.waiting_share,
        always_on=wanted.always_on,
    )


@dataclass(frozen=True, slots=True)
class SetNodesPower:
    """Have Slurm power nodes down, or up."""

    names: tuple[str, ...]
    on: bool


PoolKey = tuple[object, ...]


@dataclass(slots=True)
class SlurmPowerSaving:
    """What is remembered between looks: pools with their accounts, since when nodes are idle, and what was ordered."""

    settings: PowerSavingSettings
    pools: dict[PoolKey, NodePool] = field(default_factory=dict)
    _idle_since_s: dict[str, float] = field(default_factory=dict)
    _ordered_s: dict[tuple[str, bool], float] = field(default_factory=dict)

    def decide(self, jobs: Iterable[SlurmJob], nodes: Sequence[SlurmNode], *, now_s: float) -> list[SetNodesPower]:
        """Returns what is to be ordered of Slurm."""
        held = {name for job in jobs if job.holds_resources for name in job.nodes}
        usable = [node for node in nodes if node.name not in self.settings.always_on and not node.closed]
        by_pool: dict[PoolKey, list[NodeActivity]] = {}
        for node in usable:
            by_pool.setdefault(_pool_of(node), []).append(self._observe(node, held, now_s))
        self._forget({node.name for node in usable}, now_s)
        for gone in self.pools.keys() - by_pool.keys():
            del self.pools[gone]
        found = [order for key, members in by_pool.items() for order in self._decide_pool(key, members, now_s)]
        return sorted(found, key=lambda one: (one.on, one.names))

    def _decide_pool(self, key: PoolKey, nodes: list[NodeActivity], now_s: float) -> Iterable[SetNodesPower]:
        pool = self.pools.get(key)
        if pool is None:
            pool = self.pools[key] = NodePool(
                self.settings.costs,
                warm_nodes=self.settings.warm_nodes,
                waiting_share=self.settings.waiting_share,
                allowance_j=len(nodes) * self.settings.costs.transition_j,
            )
            pool.adopt(now_s, asleep=sum(node.power in _GONE for node in nodes))
        busy = sum(node.idle_since_s is None for node in nodes)
        changes = choose_nodes(nodes, pool.update(now_s, nodes=len(nodes), busy=busy))
        for names, on in ((changes.sleep, False), (changes.wake, True)):
            due = tuple(name for name in names if now_s - self._ordered_s.get((name, on), -_ORDER_S) >= _ORDER_S)
            self._ordered_s.update(((name, on), now_s) for name in due)
            if due:
                yield SetNodesPower(due, on)

    def _observe(self, node: SlurmNode, held: set[str], now_s: float) -> NodeActivity:
        if node.name in held or not _IN_USE.isdisjoint(node.states):
            self._idle_since_s.pop(node.name, None)
            return NodeActivity(name=node.name, power=read_node_power(node), idle_since_s=None)
        since_s = self._idle_since_s.setdefault(node.name, now_s)
        return NodeActivity(name=node.name, power=read_node_power(node), idle_since_s=since_s)

    def _forget(self, names: set[str], now_s: float) -> None:
        for name in self._idle_since_s.keys() - names:
            del self._idle_since_s[name]
        for order in [order for order, given_s in self._ordered_s.items() if now_s - given_s >= _ORDER_S]:
            del self._ordered_s[order]


def read_node_power(node: SlurmNode) -> NodePower:
    """Returns what a node's states say of its power."""
    states = node.states
    if states & {"POWERING_UP", "POWER_UP"}:
        return NodePower.WAKING
    if "POWERED_DOWN" in states:
        return NodePower.ASLEEP
    return NodePower.FALLING_ASLEEP if states & {"POWERING_DOWN", "POWER_DOWN"} else NodePower.AWAKE


def _pool_of(node: SlurmNode) -> PoolKey:
    """What nodes have in common that may stand in for one another."""
    return node.partitions, node.features, node.gpus, node.cpus, node.memory_bytes
