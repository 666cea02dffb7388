"""What no measurement is needed for: watts between idle and limit, quantiles in order, and what cannot fit.

Owns those rules. Must not know models.

A limit is held within 5 %, except near the lowest one that a part takes, where it could not be
held in Zeus's sweeps: up to 21 % over on A40 at 100 W. What is allowed never falls with a rising limit.
"""

from collections.abc import Mapping

from eelgrid_controller.profiles.answers import Basis, Estimate
from eelgrid_controller.profiles.axes import limit_w, place, product_of
from eelgrid_controller.profiles.points import Configuration
from eelgrid_controller.profiles.store import Profile
from eelgrid_protos.catalogue import Catalogue

__all__ = ["bounded", "fits", "rising"]

_OVER, _OVER_AT_LEAST = 1.05, 1.25  # of the limit
_NEAR_LEAST = 1.2  # times the lowest limit
_IDLE = 0.9  # of the catalogue's idle watts, which differ between boards


def bounded(estimate: Estimate, configuration: Configuration, catalogue: Catalogue) -> Estimate:
    """Watts of whole GPUs within what the part can draw; what was measured stays as it is."""
    product = product_of(configuration.gpu_model, catalogue)
    limit = limit_w(configuration, catalogue)
    if product is None or limit is None or configuration.mig_profile or estimate.basis is Basis.MEASURED:
        return estimate
    near_w = limit if product.power_min_w is None else min(limit, _NEAR_LEAST * product.power_min_w)
    least = _IDLE * product.idle_w * configuration.gpus
    most = max(max(_OVER_AT_LEAST * near_w, _OVER * limit) * configuration.gpus, least)
    middle, lower, upper = (min(max(one, least), most) for one in estimate[:3])
    return Estimate(middle, lower, upper, estimate.basis)


def rising(latencies: Mapping[float, Estimate]) -> Mapping[float, Estimate]:
    """Latencies that never fall with their quantile."""
    found: dict[float, Estimate] = {}
    below = Estimate(0.0, 0.0, 0.0, Basis.PRIOR)
    for quantile in sorted(latencies):
        one = latencies[quantile]
        below = Estimate(
            max(one.median, below.median), max(one.lower, below.lower), max(one.upper, below.upper), one.basis
        )
        found[quantile] = below
    return found


def fits(profile: Profile, configuration: Configuration, catalogue: Catalogue) -> bool | None:
    """False if it did not run with as much room or more, True if it did with as little or less, else None.

    Room is memory: a larger slice and more GPUs give more, a larger batch and more processes leave less.
    """
    asked = place(configuration, catalogue).numbers
    found: bool | None = None
    for cell in profile.cells.values():
        other = cell.configuration
        if other.gpu_model != configuration.gpu_model or other.label != configuration.label:
            continue
        theirs = place(other, catalogue).numbers
        room = [asked["memory"] - theirs["memory"], asked["gpus"] - theirs["gpus"]]
        room += [theirs["batch"] - asked["batch"], theirs["processes"] - asked["processes"]]
        if cell.runs and min(room) >= -1e-9:
            found = True
        if not cell.runs and max(room) <= 1e-9:
            return False
    return found
