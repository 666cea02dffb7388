"""The mark on the pod of the controller that leads, by which a Service finds it.

Owns one label, on pods of ours alone. Must not know elections: it is told terms.

Theory. Agents and operators speak to the leader only: a standby has an empty journal. A
Service selects by labels, so whoever leads carries one; it takes it from all others when
its term begins, since one that was cut off cannot do so itself. The label follows the
Lease by one write; what reaches a former leader meanwhile is answered from its own state
and changes no pod, since every write to a pod asks for the term.
"""

import asyncio
import logging

from eelgrid_controller.adapters.kubernetes.elector import Term
from eelgrid_controller.adapters.kubernetes.errors import ClusterError, NotFound
from eelgrid_controller.adapters.kubernetes.port import Cluster
from eelgrid_controller.adapters.kubernetes.resources import PODS

__all__ = ["LeaderLabel"]

ROLE = "eelgrid.io/role"
_LEADER = "leader"
_AGAIN_S = 2.0


class LeaderLabel:
    """Keeps the label of one pod as its term is."""

    def __init__(self, cluster: Cluster, *, name: str, namespace: str, log: logging.Logger) -> None:
        self._cluster = cluster
        self._name, self._namespace = name, namespace
        self._log = log
        self._leads = False
        self._wake = asyncio.Event()
        # A container that starts anew in its pod finds the label of its life before.
        self._wake.set()

    def turned(self, term: Term | None) -> None:
        """A term begins, or ends."""
        self._leads = term is not None
        self._wake.set()

    async def run(self) -> None:
        """Write until cancelled; what fails is written again."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._write(self._name, _LEADER if self._leads else None)
                if self._leads:
                    await self._take_from_others()
            except ClusterError as error:
                self._log.warning("label=%s written=no error=%s", ROLE, error)
                await asyncio.sleep(_AGAIN_S)
                self._wake.set()

    async def _take_from_others(self) -> None:
        marked = await self._cluster.list(PODS, namespace=self._namespace, labels=f"{ROLE}={_LEADER}")
        for pod in marked.items:
            name = pod["metadata"]["name"]
            if name != self._name:
                await self._write(name, None)

    async def _write(self, name: str, value: str | None) -> None:
        try:
            await self._cluster.patch(PODS, name, {"metadata": {"labels": {ROLE: value}}}, namespace=self._namespace)
        except NotFound:
            # Outside of a pod, or one that has gone since.
            self._log.debug("label=%s pod=%s written=no", ROLE, name)
