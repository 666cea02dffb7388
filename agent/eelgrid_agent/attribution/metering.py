"""What every tick adds between two slow looks: totals, how far they may be off, and utilization.

Owns the energy windows of a node's devices and the mean of their utilization.
Must not know owners. Time is that of the tick.

Theory. A slow look comes every few seconds and a tick every second or tenth of
one. Uncertainty grows with the steps over which power was really integrated,
and a device that worked between two looks was not idle, so both are taken from
every tick; a look takes the mean of the utilization since the look before.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from eelgrid_agent.attribution.uncertainty import EnergyEstimate, EnergyWindow
from eelgrid_agent.device import Missing, RawReadings
from eelgrid_agent.sampler import GPU_READINGS, Observation
from eelgrid_protos.catalogue import Catalogue
from eelgrid_protos.messages import GPUS_PER_NODE_MOST, READING_RANGES, Gpu, NodeEventKind, Reading

__all__ = ["Energies", "Metering"]

# Devices present and departed whose windows are kept, as the sampler keeps their meters.
_DEVICES_MOST = 2 * GPUS_PER_NODE_MOST
_ENERGY_ROW = GPU_READINGS.index(Reading.ENERGY_J)
_POWER_ROW = GPU_READINGS.index(Reading.POWER_W)
_UTILIZATION_ROW = GPU_READINGS.index(Reading.UTILIZATION_RATIO)
_LIMIT_ROW = GPU_READINGS.index(Reading.POWER_LIMIT_W)
_COUNTER_J_MOST = READING_RANGES[Reading.ENERGY_J].high


@dataclass(frozen=True, slots=True, kw_only=True)
class Energies:
    """A node's devices by UUID at its newest tick; a device that could not say is left out."""

    monotonic_ns: int
    wall_ns: int
    total_j: Mapping[str, float] = field(default_factory=dict)
    # Since the energies before.
    utilization: Mapping[str, float] = field(default_factory=dict)
    estimates: Mapping[str, EnergyEstimate] = field(default_factory=dict)
    # The highest that was enforced since the energies before.
    limits_w: Mapping[str, float] = field(default_factory=dict)


class _Tally:
    """One device."""

    __slots__ = ("limit_w", "told", "total_j", "used", "window")

    def __init__(self, window: EnergyWindow) -> None:
        self.window = window
        self.total_j: float | None = None
        self.used, self.told = 0.0, 0
        self.limit_w: float | None = None


class Metering:
    """One node's devices."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._tallies: dict[str, _Tally] = {}
        self._monotonic_ns = self._wall_ns = 0

    def tick(
        self, gpus: Iterable[Gpu], looks: Iterable[tuple[str, RawReadings]], seen: Observation, *,
        monotonic_ns: int,
    ) -> None:  # fmt: skip
        """What the sampler made of one look; `looks` in its order, `gpus` of the inventory."""
        tick = seen.tick
        resets = {event.gpu_uuid for event in seen.events if event.kind is NodeEventKind.COUNTER_RESET}
        absent = {position for position, _ in tick.gpu_absences}
        self._monotonic_ns, self._wall_ns = monotonic_ns, tick.time_ns
        for column, (uuid, raw) in enumerate(looks):
            tally = self._tallies.get(uuid)
            if tally is None:
                tally = self._tallies[uuid] = _Tally(self._window(uuid, gpus))
            energy, power, used, limit = (
                None if (cell := row * tick.gpus + column) in absent else tick.gpu_values[cell]
                for row in (_ENERGY_ROW, _POWER_ROW, _UTILIZATION_ROW, _LIMIT_ROW)
            )
            counter = raw.energy_counter_j
            tally.total_j = energy
            tally.window.observe(
                at_ns=monotonic_ns, total_j=energy, power_w=power, reset=uuid in resets,
                counted=not isinstance(counter, Missing) and 0.0 <= counter <= _COUNTER_J_MOST,
            )  # fmt: skip
            if used is not None:
                tally.used, tally.told = tally.used + used, tally.told + 1
            if limit is not None:
                tally.limit_w = max(limit, tally.limit_w or 0.0)

    def take(self, *, uncounted_s: Mapping[str, float]) -> Energies:
        """The energies now; utilization begins anew. `uncounted_s` are seconds of each device that no total holds."""
        totals, utilization, estimates, limits_w = {}, {}, {}, {}
        for uuid, tally in self._tallies.items():
            if tally.total_j is not None:
                totals[uuid] = tally.total_j
            if tally.told:
                utilization[uuid] = tally.used / tally.told
                tally.used, tally.told = 0.0, 0
            if tally.limit_w is not None:
                limits_w[uuid], tally.limit_w = tally.limit_w, None
            estimate = tally.window.estimate(uncounted_s=uncounted_s.get(uuid, 0.0))
            if estimate is not None:
                estimates[uuid] = estimate
        return Energies(
            monotonic_ns=self._monotonic_ns, wall_ns=self._wall_ns, total_j=totals, utilization=utilization,
            estimates=estimates, limits_w=limits_w,
        )  # fmt: skip

    def _window(self, uuid: str, gpus: Iterable[Gpu]) -> EnergyWindow:
        for old in list(self._tallies)[: max(0, len(self._tallies) + 1 - _DEVICES_MOST)]:
            del self._tallies[old]
        key = next((gpu.catalogue_key for gpu in gpus if gpu.uuid == uuid), "")
        product = self._catalogue.products.get(key)
        # Power is the instant field where there is one; it sees the least, so the bound is the wider one.
        return EnergyWindow(None if product is None else product.sensor.instant)
