"""What the core answered about one unit: where the unit stands from then on, and what people are told.

Owns these changes of a unit. Must not know what follows; `looking.py` and `elastic.py` do.
"""

from typing import NamedTuple

from eelgrid_controller.kubernetes.gangs import Stand, Unit
from eelgrid_controller.kubernetes.gate_events import Cancelled, Deferred, Placed, Refused
from eelgrid_controller.kubernetes.setbacks import GateSettings

__all__ = ["Answer", "Said", "answered"]

Answer = Placed | Deferred | Cancelled | Refused


class Said(NamedTuple):
    """What is told to who waits for the unit."""

    text: str
    is_warning: bool = False


def answered(unit: Unit, answer: Answer, at_s: float, settings: GateSettings) -> Said | None:
    """The unit as it stands now; what was refused is asked again later."""
    match answer:
        case Placed(_, places, spec):
            unit.no_node = ""
            if unit.stand is not Stand.LEAVING:
                unit.placed(places, spec, moves=settings.moves)
        case Deferred(reason=reason):
            if unit.stand not in (Stand.LEAVING, Stand.PLACED):
                unit.stand, unit.places, unit.why = Stand.WAITING, {}, reason
                return Said(f"waits: {reason}")
        case Cancelled():
            unit.stand, unit.places, unit.slots = Stand.UNKNOWN, {}, {}
            unit.attempt += 1
            unit.released()
        case Refused(why=why, is_taken=is_taken):
            if unit.stand is Stand.ASKED:
                return _refused(unit, why, at_s, settings.retry_s, is_taken=is_taken)
            unit.released()
    return None


def _refused(unit: Unit, why: str, at_s: float, retry_s: float, *, is_taken: bool) -> Said | None:
    if is_taken:
        unit.attempt += 1
    unit.stand, unit.slots, unit.why = Stand.REFUSED, {}, why
    unit.released()
    unit.refusals += 1
    unit.retry_s = at_s + (0.0 if is_taken else retry_s * min(unit.refusals, 20))
    return None if is_taken else Said(f"not accepted: {why}", is_warning=True)
