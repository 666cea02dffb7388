"""Parts of a controller that are made only where its configuration asks for them: page, webhook, pods, savings, traces.

Owns how each is made, begun and, by the stack that is handed in, stopped. Libraries that only such a part needs
are imported here where it begins, so that a controller without it never loads them. Must not decide which are wanted
in what order: that is the composition's.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eelgrid_controller.adapters.agents import AgentService
from eelgrid_controller.adapters.energy_desk import EnergyDesk
from eelgrid_controller.adapters.prometheus import Metrics
from eelgrid_controller.adapters.savings_desk import SavingsDesk
from eelgrid_controller.adapters.tracing import Endpoint, Tracing, Watches
from eelgrid_controller.clock import Clock
from eelgrid_controller.config import ControllerConfig
from eelgrid_controller.loop import ControllerLoop
from eelgrid_controller.steward.steward import Steward
from eelgrid_controller.telemetry import Telemetry
from eelgrid_protos.catalogue import Catalogue
from eelgrid_protos.transport import TlsFiles

if TYPE_CHECKING:
    from eelgrid_controller.adapters.kubernetes.placing import Placing
    from eelgrid_controller.adapters.kubernetes.webhook import Webhook

__all__ = ["OptionalParts"]


@dataclass(frozen=True, slots=True)
class OptionalParts:
    """Begins what `config` asks for; whatever began is stopped by `stack`."""

    config: ControllerConfig
    metrics: Metrics
    clock: Clock
    log: logging.Logger
    stack: AsyncExitStack

    def follow_placements(
        self, endpoint: Endpoint | None, watches: Watches, *, loop: ControllerLoop, agents: AgentService, instance: str
    ) -> None:
        """Trace placements to a collector; without an endpoint nothing."""
        if endpoint is None:
            return
        watches.tracing = tracing = Tracing(
            endpoint, instance=instance, now_ns=self.clock.now_ns, has_agent=agents.speaks_for,
            log=self.log.getChild("tracing"),
        )  # fmt: skip
        state = loop.core.state
        tracing.traces.go_on(state.workloads[key] for key in state.pending)
        loop.listeners.append(tracing.traces.committed)
        agents.listeners.append(tracing.traces.told)
        self.metrics.add(tracing.families)
        self.stack.push_async_callback(tracing.stop)

    def count_savings(self, loop: ControllerLoop, products: Catalogue) -> SavingsDesk | None:
        """Tell what placement saves against best fit."""
        if not self.config.savings:
            return None
        desk = SavingsDesk(loop=loop, catalogue=products, clock=self.clock, log=self.log.getChild("savings"))
        self.metrics.add(desk.families)
        following = asyncio.create_task(desk.run())
        self.stack.callback(following.cancel)
        return desk

    async def place_pods(
        self, watches: Watches, *, loop: ControllerLoop, agents: AgentService, steward: Steward, ledger: EnergyDesk
    ) -> "Placing | None":
        """Place a cluster's pods."""
        if self.config.kubernetes is None:
            return None
        from eelgrid_controller.adapters.kubernetes.asked import is_ours
        from eelgrid_controller.adapters.kubernetes.placing import Placing
        from eelgrid_controller.adapters.kubernetes.pod_users import PodUsers
        from eelgrid_controller.kubernetes.power_status import Draw

        placing = Placing(
            self.config.kubernetes,
            loop=loop,
            has_agent=agents.speaks_for,
            awaits_agent=agents.is_awaited,
            foresees=steward.foresees,
            data=self.config.data,
            draws=lambda: {name: Draw(*one) for name, one in steward.standing.drawn.items()},
            devices=agents.devices,
            clock=self.clock,
            log=self.log.getChild("kubernetes"),
            promises=steward.promises,
        )
        self.metrics.add(placing.families)
        if watches.tracing is not None:
            watches.tracing.follow_pods(placing.engine.writes.listeners, is_ours)
        users = PodUsers()
        placing.engine.hear_pods(users.heard)
        ledger.user_of_pod = users.of
        await placing.start()
        self.stack.push_async_callback(placing.stop)
        return placing

    async def gate_pods(self) -> "Webhook | None":
        """Answer the API server's admission reviews at once: that needs nothing of what else there is."""
        if self.config.kubernetes is None or (wanted := self.config.kubernetes.webhook) is None:
            return None
        from eelgrid_controller.adapters.kubernetes.counts import webhook_families
        from eelgrid_controller.adapters.kubernetes.webhook import Webhook, WebhookFiles

        files = WebhookFiles(wanted.certificate, wanted.key)
        webhook = Webhook(wanted.rules, files, log=self.log.getChild("webhook"))
        self.metrics.add(lambda: webhook_families(webhook))
        await webhook.start(wanted.listen)
        self.stack.push_async_callback(webhook.stop)
        return webhook

    async def serve_page(
        self, *, loop: ControllerLoop, telemetry: Telemetry, steward: Steward, tls: TlsFiles | None, insecure: bool,
        admit: Callable[[bytes | None], None] | None,
    ) -> int | None:  # fmt: skip
        """Serve the live page; its port."""
        if not self.config.page:
            return None
        from eelgrid_controller.adapters.page_door import PageDoor
        from eelgrid_controller.adapters.page_hub import PageHub
        from eelgrid_controller.adapters.page_source import LoopSource

        log = self.log.getChild("page")
        source = LoopSource(loop, telemetry, steward.promises, self.clock)
        hub = PageHub(source, log=log)
        door = PageDoor(hub, source, tls=tls, insecure=insecure, log=log, admit=admit)
        port = await door.start(self.config.page)
        loop.listeners.append(hub.committed)
        self.stack.push_async_callback(door.stop)
        return port
