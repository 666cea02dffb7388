"""Ability `taints`: no new pod comes to a node whose GPUs are being cut anew.

Owns the loop. Must not know why a layout is wanted, nor what the taint's patch looks like
(`kubernetes/draining.py`).

Theory. A node is tainted for as long as a layout that is wanted of one of its GPUs does not
stand, in pools where agents act; that is read from the core each time. Which nodes carry the
taint is read from nodes: so a taint that a process left behind is found and removed. Nobody
is evicted: managed pods end or are moved, agents wait for whatever is busy, and what others
hold is told.
"""

import asyncio

from eelgrid_controller.adapters.kubernetes.abilities import Surroundings
from eelgrid_controller.adapters.kubernetes.errors import ClusterError
from eelgrid_controller.adapters.kubernetes.move_writes import MoveWrites
from eelgrid_controller.core import Core
from eelgrid_controller.kubernetes.draining import Taints, is_tainted, taint_patch
from eelgrid_controller.kubernetes.gate_events import Key
from eelgrid_controller.kubernetes.names import TAINT_REPARTITION
from eelgrid_controller.modes import enforces
from eelgrid_controller.slices import stands

__all__ = ["TaintsPart", "unfinished_nodes"]

_TURN_S = 1.0


class TaintsPart:
    """The ability; a part."""

    def __init__(self, around: Surroundings) -> None:
        self.put = 0
        self.removed = 0
        self._around = around
        self._writes = MoveWrites(around)
        self._taints = Taints()

    async def run(self) -> None:
        """Keep taints as they should be until cancelled."""
        while True:
            await asyncio.sleep(_TURN_S)
            if self._around.elector.term() is not None and self._around.engine.nodes.is_synced:
                await self._turn()

    async def _turn(self) -> None:
        around = self._around
        nodes = {key.name: node for key, node in around.engine.nodes.objects.items()}
        wanted = {name: why for name, why in unfinished_nodes(around.loop.core).items() if name in nodes}
        tainted = {name for name, node in nodes.items() if is_tainted(node)}
        now_s = around.clock.monotonic_s()
        for name, is_wanted in self._taints.turns(wanted, tainted, now_s).items():
            body = taint_patch(nodes[name], wanted=is_wanted)
            if not body:
                continue
            try:
                await self._writes.node_patch(name, body)
            except ClusterError as error:  # another wrote the list, or we may not: looked at anew next time
                around.log.warning("node=%s taint=%s written=no error=%s", name, is_wanted, error)
                continue
            self.put += is_wanted
            self.removed += not is_wanted
            held = around.engine.gate.others.gpus(name)
            foreign = f"; others hold {held} GPUs there, which stay" if held else ""
            text = f"{TAINT_REPARTITION}: no new pods until {wanted[name]}{foreign}" if is_wanted else ""
            if self._taints.is_given_up(name, now_s):
                text = (
                    f"{TAINT_REPARTITION} removed after {self._taints.most_s:g} s: {wanted.get(name, '')} has not come"
                )
            await self._writes.tell("Node", Key("", name), name, text or f"{TAINT_REPARTITION} removed: its GPUs stand")


def unfinished_nodes(core: Core) -> dict[str, str]:
    """Nodes where a layout is wanted that does not stand, and which."""
    found = {}
    for name, record in core.state.nodes.items():
        if not record.layouts or not enforces(core.state.policy, record.inventory.pool):
            continue
        laid_out = ((gpu, record.layouts.get(gpu.uuid)) for gpu in record.inventory.gpus)
        missing = [str(gpu.index) for gpu, layout in laid_out if layout is not None and not stands(gpu, layout)]
        if missing:
            found[name] = f"GPU {', '.join(missing)} is cut as planned"
    return found
