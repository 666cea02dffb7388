"""The budgets and the tariff of a scene, as operators would state them.

Owns the numbers. Must not know policies. A rack of training GPUs may draw `rack_share` of
what its GPUs may have at their largest limits, all training together `cluster_share`; idle
GPUs are counted as drawing what they draw idle, those for services as much as they may.
"""

import numpy as np

from bench.loop.accounts import JOULES_PER_KWH, Limit, Prices
from bench.loop.scene import GPUS, Scene
from eelgrid_controller.objectives.power.budgets import BudgetTree, PowerBudgetNode
from eelgrid_controller.objectives.power.tariffs import EnergyTariff, StepFunction

__all__ = ["PRICES", "budgets", "is_service", "limits", "tariff"]

_NIGHT, _DAY, _EVENING = 0.12, 0.22, 0.34  # currency a kWh
PRICES = Prices(
    per_kwh=tuple(_NIGHT if hour < 6 or hour >= 22 else _EVENING if 17 <= hour < 21 else _DAY for hour in range(24)),
    carbon_g_per_kwh=tuple(450.0 if 17 <= hour < 22 else 250.0 if 9 <= hour < 16 else 350.0 for hour in range(24)),
    pue=tuple(1.25 if 11 <= hour < 19 else 1.15 for hour in range(24)),
)
_SERVICES = GPUS["h100"]


def _gpu_keys(scene: Scene) -> list[tuple[str, str]]:
    """Rack and catalogue key of every GPU."""
    return [(node.rack, node.key) for node in scene.nodes for _ in range(node.gpus)]


def is_service(scene: Scene) -> np.ndarray:
    """(G,) whether a GPU is one for services."""
    return np.array([key == _SERVICES for _, key in _gpu_keys(scene)])


def limits(scene: Scene) -> list[Limit]:
    """All budgets, the cluster first."""
    keys = _gpu_keys(scene)
    most_w = np.array([scene.catalogue.products[key].power_max_w or 0.0 for _, key in keys])
    serving = is_service(scene)
    whole_w = float(most_w[serving].sum() + scene.cluster_share * most_w[~serving].sum())
    found = [Limit("cluster", whole_w, np.ones(len(keys), bool))]
    for rack in sorted({rack for rack, key in keys if key != _SERVICES}):
        members = np.array([one == rack for one, _ in keys])
        found.append(Limit(rack, scene.rack_share * float(most_w[members].sum()), members))
    return found


def budgets(scene: Scene) -> BudgetTree:
    """The same as the planner is told them."""
    keys = _gpu_keys(scene)
    products = scene.catalogue.products
    most_w = np.array([products[key].power_max_w or 0.0 for _, key in keys])
    idle_w = np.array([products[key].idle_w for _, key in keys])
    serving = is_service(scene)
    found = []
    for limit in limits(scene):
        others_w = float(idle_w[limit.members & ~serving].sum() + most_w[limit.members & serving].sum())
        parent = None if limit.name == "cluster" else "cluster"
        found.append(PowerBudgetNode(limit.name, limit.limit_w, parent, others_w))
    return BudgetTree(found)


def tariff() -> EnergyTariff:
    """The same prices in joules."""
    starts_s = tuple(3600.0 * hour for hour in range(24))
    return EnergyTariff(
        price=StepFunction(starts_s, tuple(price / JOULES_PER_KWH for price in PRICES.per_kwh)),
        pue=StepFunction(starts_s, PRICES.pue),
    )
