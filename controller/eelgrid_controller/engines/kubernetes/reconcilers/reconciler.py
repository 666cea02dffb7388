"""Base of the reconcilers: their context, their protocol, and the loop that restarts them after errors."""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from eelgrid_controller.clock import Clock
from eelgrid_controller.engines.kubernetes.api.port import ClusterClient
from eelgrid_controller.engines.kubernetes.power.policy_merge import PlacePower
from eelgrid_controller.engines.kubernetes.reconcilers.core_commands import CoreCommandPort
from eelgrid_controller.engines.kubernetes.reconcilers.gate_engine import GateEngine, LeadershipSource
from eelgrid_controller.objectives.forecasts import ForecastQuestion, ProfileForecast
from eelgrid_controller.state.telemetry import DeviceReports
from eelgrid_protos.messages import ListPromisesResponse

# A prediction where nothing was measured; None while it is on its way.
ForecastLookup: TypeAlias = Callable[[ForecastQuestion], ProfileForecast | None]

_AGAIN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcilerContext:
    """What a part may use; `engine` holds pods and nodes, and tells their changes (`hear_pods`)."""

    cluster: ClusterClient
    loop: CoreCommandPort
    elector: LeadershipSource
    engine: GateEngine
    has_agent: Callable[[str], bool]
    devices: DeviceReports
    identity: str
    namespace: str
    data: Path  # where the journal lies
    draws: Callable[[], Mapping[str, PlacePower]]  # what is drawn below each budget of the policy, as read last
    clock: Clock
    rng: random.Random
    log: logging.Logger
    foresees: ForecastLookup | None = None
    promises: Callable[[], ListPromisesResponse] = ListPromisesResponse  # how they are kept now


class Reconciler(Protocol):
    """One ability."""

    async def run(self) -> None:
        """Work until cancelled; may raise, and is then run again from the beginning."""


async def run_with_restarts(part: Reconciler, log: logging.Logger) -> None:
    """Run a part for ever, whatever happens inside."""
    while True:
        try:
            await part.run()
        except Exception:  # the next run begins from lists
            log.exception("part=failed action=begin_again seconds=%g", _AGAIN_S)
        await asyncio.sleep(_AGAIN_S)
