"""What a device draws doing nothing: bare, and with contexts open.

Owns what is learnt of idle power and the priors before it. Must not know how
joules are split, nor any clock.

Theory. Bare idle power is the lowest mean power over an interval in which no
context was open and nothing was busy; never learnt under load, and not in the
first seconds of quiet either, while clocks fall. Before that it is the
catalogue's, with MIG on or off. The context step is the lowest mean power with
contexts open and nothing busy, less bare idle; its prior is the middle of what
was measured on HBM parts (26 to 50 W on A100 and H100) and 66 W on the L40S
(arXiv 2605.23918). Of other parts nobody has published it: nothing is assumed,
and context idle is nothing until it was seen. A minimum is kept for each MIG
mode, since MIG alone changes what an empty board draws.
"""

from dataclasses import dataclass, replace

from eelgrid_agent.attribution.shares import Confidence
from eelgrid_agent.attribution.split import Idle
from eelgrid_protos.catalogue import Product

__all__ = ["CONTEXT_STEP_W_MOST", "IdleModel", "idle_prior"]

# Quiet before this is the fall of clocks and the sensor's memory of work.
SETTLED_S = 10.0
# A shorter interval holds too few counter refreshes.
INTERVAL_S_LEAST = 1.0
# Above what any part was seen to add: more than this is work that no reading shows.
CONTEXT_STEP_W_MOST = 150.0
# No board with its memory on draws less.
BARE_W_LEAST = 1.0

_HBM_CAPABILITIES = frozenset({"8.0", "9.0", "10.0", "10.3"})
_HBM_STEP_W = 38.0
_STEPS_W = {"l40s": 66.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mode:
    """What was learnt in one MIG mode."""

    bare_w: float | None = None
    parked_w: float | None = None


def idle_prior(product: Product | None, *, mig_enabled: bool) -> Idle:
    """What is assumed of a part before it was seen idle."""
    if product is None:
        return Idle(bare_w=0.0, context_w=0.0, confidence=Confidence.LOW)
    bare_w = product.idle_w
    if mig_enabled and product.idle_mig_w is not None:
        bare_w = product.idle_mig_w
    step_w = _STEPS_W.get(product.key, _HBM_STEP_W if product.compute_capability in _HBM_CAPABILITIES else 0.0)
    return Idle(bare_w=bare_w, context_w=step_w, confidence=Confidence.MEDIUM if step_w else Confidence.LOW)


class IdleModel:
    """One device."""

    __slots__ = ("_modes", "_parked_s", "_quiet_s")

    def __init__(self) -> None:
        self._modes = {False: _Mode(), True: _Mode()}
        self._quiet_s = 0.0
        self._parked_s = 0.0

    def observe(
        self, *, power_w: float, seconds: float, contexts: bool | None, busy: bool | None, mig_enabled: bool
    ) -> None:
        """The mean power of an interval; `contexts` and `busy` are None where nothing tells."""
        self._quiet_s = self._quiet_s + seconds if contexts is False and busy is False else 0.0
        self._parked_s = self._parked_s + seconds if contexts is True and busy is False else 0.0
        if seconds < INTERVAL_S_LEAST or power_w < BARE_W_LEAST:
            return
        mode = self._modes[mig_enabled]
        # What the interval itself lasted does not count: it may have begun with the fall.
        if self._quiet_s - seconds >= SETTLED_S:
            lowest = power_w if mode.bare_w is None else min(mode.bare_w, power_w)
            self._modes[mig_enabled] = replace(mode, bare_w=lowest)
        elif self._parked_s - seconds >= SETTLED_S:
            lowest = power_w if mode.parked_w is None else min(mode.parked_w, power_w)
            self._modes[mig_enabled] = replace(mode, parked_w=lowest)

    def idle(self, product: Product | None, *, mig_enabled: bool) -> Idle:
        """The best of what was learnt and what is assumed."""
        prior = idle_prior(product, mig_enabled=mig_enabled)
        mode = self._modes[mig_enabled]
        bare_w = prior.bare_w if mode.bare_w is None else mode.bare_w
        context_w, confidence = prior.context_w, prior.confidence
        if mode.parked_w is not None and bare_w > 0.0:
            context_w = min(max(0.0, mode.parked_w - bare_w), CONTEXT_STEP_W_MOST)
            confidence = Confidence.HIGH if mode.bare_w is not None else Confidence.MEDIUM
        elif mode.bare_w is not None:
            confidence = Confidence.MEDIUM
        return Idle(bare_w=bare_w, context_w=context_w, confidence=confidence)
