"""The device plugins of a real node, put together from its flags, its inventory, its plan and its kubelet.

Owns the wiring. Decides nothing.
"""

from collections.abc import Callable

from eelgrid_agent.attribution.pod_resources import PodResources
from eelgrid_agent.config import AgentConfig
from eelgrid_agent.kubelet.choice import Node as Chosen
from eelgrid_agent.kubelet.choice import wanted_sets
from eelgrid_agent.kubelet.offers import by_place, offers_of, slices_of
from eelgrid_agent.kubelet.plugins import DevicePlugins, given_by_cdi, given_by_environment
from eelgrid_agent.node import Node
from eelgrid_protos.device_plugin import Given

__all__ = ["device_plugins"]


def device_plugins(
    config: AgentConfig, node: Node, kubelet: PodResources, *, given: Callable[[], None]
) -> DevicePlugins:
    """Offers what the inventory has, and prefers what the plan in force says; `given` hears of each allocation."""
    answer = given_by_cdi if config.device_plugin == "cdi" else given_by_environment

    def give(ids: tuple[str, ...]) -> Given:
        given()
        kubelet.hurry()
        return answer(ids)

    def look() -> Chosen:
        plan, held = node.guard.plan, kubelet.containers or ()
        return Chosen(
            index_of=by_place(node.inventory.gpus),
            links=node.inventory.links,
            wanted=() if plan is None else wanted_sets(plan.assignments),
            held=frozenset(device for container in held for _, device in container.devices),
            slices=slices_of(node.inventory.gpus),
        )

    return DevicePlugins(
        config.device_plugins_folder,
        offers=lambda: offers_of(node.inventory.gpus, config.device_domain),
        node=look,
        give=give,
    )
