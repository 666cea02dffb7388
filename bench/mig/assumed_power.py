"""Assumed watts for points without a power measurement: a prior from the catalogue only.

Owns that guess and its name. Must not know plans.

Theory: a board draws its idle watts, and with all SMs at work its busy ones. A
slice adds the part in between by its share of the SMs, whatever runs there; a whole
GPU draws its busy watts. Under real work a slice adds less, and how much less
differs between kernels (arXiv 2501.17752): measured watts replace the guess as
soon as there are any.
"""

from collections.abc import Iterable
from dataclasses import replace

from eelgrid_controller.partition.options import WHOLE
from eelgrid_controller.partition.problem import InvalidProblem
from eelgrid_controller.profiles.points import Point
from eelgrid_protos.catalogue.products import Product

ASSUMED_SOURCE = "watts assumed by SM share"


def with_assumed_power(points: Iterable[Point], products: Iterable[Product]) -> tuple[Point, ...]:
    """The points, those without watts with the prior of their product; raises BadProblem for a profile it lacks."""
    by_model = {product.model: product for product in products}
    found = []
    for point in points:
        product = by_model.get(point.configuration.gpu_model)
        if point.power_w is not None or product is None:
            found.append(point)
            continue
        source = f"{point.source}; {ASSUMED_SOURCE}" if point.source else ASSUMED_SOURCE
        found.append(replace(point, power_w=_power_w(point, product), source=source))
    return tuple(found)


def _power_w(point: Point, product: Product) -> float:
    how = point.configuration
    if how.mig_profile == WHOLE:
        return product.busy_w * how.gpus
    profile = None if product.mig is None else product.mig.profile(how.mig_profile)
    if profile is None or product.mig is None:
        raise InvalidProblem("points.mig_profile", f"{product.model} has no profile {how.mig_profile}", "leave it out")
    whole = max(product.mig.profiles.values(), key=lambda one: one.compute_slices)
    if profile.sm_count is None or whole.sm_count is None:
        share = profile.compute_slices / whole.compute_slices
    else:
        share = profile.sm_count / whole.sm_count
    idle_w = product.idle_w if product.idle_mig_w is None else product.idle_mig_w
    return (product.busy_w - idle_w) * share
