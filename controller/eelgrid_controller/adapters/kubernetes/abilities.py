"""Abilities beside placing: what runs next to the engine for as long as the controller does.

Owns what such a part is given, and that one that fails begins anew. Must not know what any of
them does: `placing.py` lists them, each makes itself from its surroundings.

Theory. A part is a loop over lists and watches of its own, with a pure machine inside. It
reads while another leads and writes only while this one does. Whatever goes wrong in it is
its own: the others go on, and it begins again from lists.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from eelgrid_controller.adapters.device_reports import DeviceReports
from eelgrid_controller.adapters.kubernetes.asked import Commands
from eelgrid_controller.adapters.kubernetes.engine import Elects, Engine
from eelgrid_controller.adapters.kubernetes.port import Cluster
from eelgrid_controller.clock import Clock
from eelgrid_controller.kubernetes.power_status import Draw
from eelgrid_controller.steward.forecasts import Forecast, Question
from eelgrid_protos.messages import ListPromisesResponse

__all__ = ["Foresees", "Part", "Surroundings", "keep_running"]

# A prediction where nothing was measured; None while it is on its way.
Foresees: TypeAlias = Callable[[Question], Forecast | None]

_AGAIN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a part may use; `engine` holds pods and nodes, and tells their changes (`hear_pods`)."""

    cluster: Cluster
    loop: Commands
    elector: Elects
    engine: Engine
    has_agent: Callable[[str], bool]
    devices: DeviceReports
    identity: str
    namespace: str
    data: Path  # where the journal lies
    draws: Callable[[], Mapping[str, Draw]]  # what is drawn below each budget of the policy, as read last
    clock: Clock
    rng: random.Random
    log: logging.Logger
    foresees: Foresees | None = None
    promises: Callable[[], ListPromisesResponse] = ListPromisesResponse  # how they are kept now


class Part(Protocol):
    """One ability."""

    async def run(self) -> None:
        """Work until cancelled; may raise, and is then run again from the beginning."""


async def keep_running(part: Part, log: logging.Logger) -> None:
    """Run a part for ever, whatever happens inside."""
    while True:
        try:
            await part.run()
        except Exception:  # the next run begins from lists
            log.exception("part=failed action=begin_again seconds=%g", _AGAIN_S)
        await asyncio.sleep(_AGAIN_S)
