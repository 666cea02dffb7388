"""Leader label reconciler: labels the pod of the leader, so that a Service reaches the one replica that leads.

The label is removed where a term ends, and by the next leader from pods whose process could not do so any longer.
"""

import asyncio

from eelgrid_controller.engines.kubernetes.api.elector import LeadershipTerm
from eelgrid_controller.engines.kubernetes.api.errors import ObjectNotFound
from eelgrid_controller.engines.kubernetes.api.port import PODS
from eelgrid_controller.engines.kubernetes.reconcilers.reconciler import ClusterContext, Reconciler, Result

ROLE_LABEL = "eelgrid.io/role"
_LEADER = "leader"


class LeaderLabelReconciler(Reconciler[str]):
    """Keeps the label of this process's pod as its term is; the key is the pod's name."""

    retry_most_s = 2.0  # agents reach the leader by this label

    def __init__(self, context: ClusterContext, *, name: str, namespace: str) -> None:
        super().__init__(context, "label")
        self._name, self._namespace = name, namespace
        self._leads = False
        context.elector.add_listener(self.on_term)

    def is_ready(self) -> bool:
        """Also while another leads: the label is to be removed then."""
        return True

    async def start(self, _: asyncio.TaskGroup) -> None:
        """A container that restarts in its pod may find the label of the process before it."""
        self.queue.add(self._name)

    def on_term(self, term: LeadershipTerm | None) -> None:
        """A term begins, or ends."""
        self._leads = term is not None
        self.queue.add(self._name)

    async def reconcile(self, key: str, /) -> Result | None:
        """Write the label or remove it; the leader removes it from all other pods, too."""
        leads = self._leads
        await self._write(key, _LEADER if leads else None)
        if leads:
            marked = await self.cluster.list(PODS, namespace=self._namespace, labels=f"{ROLE_LABEL}={_LEADER}")
            for pod in marked.items:
                name = pod["metadata"]["name"]
                if name != key:
                    await self._write(name, None)
        return None

    async def _write(self, name: str, value: str | None) -> None:
        body = {"metadata": {"labels": {ROLE_LABEL: value}}}
        try:
            await self.cluster.patch(PODS, name, body, namespace=self._namespace)
        except ObjectNotFound:
            # Outside of a pod, or one that was deleted since.
            self.log.debug("label=%s pod=%s written=no", ROLE_LABEL, name)
