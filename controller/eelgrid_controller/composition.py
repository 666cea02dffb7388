"""Composition of the controller: builds its parts from the configuration and connects them.

Owns the order of start and stop. Optional parts (Kubernetes, the energy ledger, the live page, tracing) are imported
only if they are configured. Must not contain behaviour of its own.
"""

import asyncio
import contextlib
import logging
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc.aio

from eelgrid_controller.clock import Clock, WallClock
from eelgrid_controller.core.core import Core
from eelgrid_controller.core.recovery import RecoveredState
from eelgrid_controller.energy.store.ledger_store import open_ledger_with
from eelgrid_controller.energy.store.ledger_writer import LedgerWriter
from eelgrid_controller.errors import ControllerConfigError
from eelgrid_controller.objectives.control_loop import ControlLoop, DurationObservers
from eelgrid_controller.objectives.observation import ObjectiveSettings
from eelgrid_controller.runtime.audit_log import AuditedJournal
from eelgrid_controller.runtime.config import ControllerConfig
from eelgrid_controller.runtime.interpreter import settle_interpreter
from eelgrid_controller.runtime.kernel_compilation import load_kernels
from eelgrid_controller.runtime.loop import ControllerLoop
from eelgrid_controller.runtime.scraper import FetchLimits, HttpFetcher, Scraper
from eelgrid_controller.runtime.stores import follow_store, open_store
from eelgrid_controller.server.energy_monitors import EnergyDayMonitor, SavingsMonitor, SpendingMonitor
from eelgrid_controller.server.following import StaleReads, StandbyServer, list_services, name_address, replace_port
from eelgrid_controller.server.grpc.agent_service import AgentService, RegistrationGuard
from eelgrid_controller.server.grpc.authorization import AuditService, AuditTrail, CallerService, open_authorizer
from eelgrid_controller.server.grpc.job_streams import JobStreamService
from eelgrid_controller.server.grpc.leader_terms import confirm_read
from eelgrid_controller.server.grpc.operator_service import OperatorService
from eelgrid_controller.server.grpc.overview_service import OverviewService
from eelgrid_controller.server.grpc.pagination import OmissionCounter
from eelgrid_controller.server.grpc.planner_services import EnergyService, ObjectiveService, PartitionService
from eelgrid_controller.server.grpc.resource_reads import ReadService
from eelgrid_controller.server.grpc.resource_views import ResourceViews
from eelgrid_controller.server.grpc.whatif_runner import ShadowRunner, WhatIfRunner
from eelgrid_controller.server.http.metrics_server import ControllerMetrics, ControllerMetricsServer, MetricSources
from eelgrid_controller.server.ingest.service import build_ingest_service
from eelgrid_controller.server.metric_collectors import (
    FleetMetrics,
    IdleGaps,
    LedgerMetrics,
    ObjectiveMetrics,
    ShellMetrics,
)
from eelgrid_controller.server.metrics.catalogue import build_family
from eelgrid_controller.server.tracing import CollectorEndpoint, LoopInstrumentation, Tracing, resolve_endpoint
from eelgrid_controller.state.cluster_state import ClusterState
from eelgrid_controller.state.telemetry import Telemetry
from eelgrid_protos import catalogue
from eelgrid_protos.catalogue.loader import Catalogue
from eelgrid_protos.connection_limits import GuardedHandlers, PeerGuard
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import Summary
from eelgrid_protos.openmetrics import MetricFamily
from eelgrid_protos.probes import Heartbeat, ProbeServer
from eelgrid_protos.rpc import (
    AGENT_SERVICE,
    FLUX_SERVICE,
    INGEST_SERVICE,
    OPERATOR_SERVICE,
    admit_everybody,
    build_handler,
)
from eelgrid_protos.transport import (
    KeyPairFiles,
    TlsFiles,
    is_loopback,
    listen_on_address,
    server_options,
    standard_services,
)

if TYPE_CHECKING:
    from eelgrid_controller.engines.flux.engine import FluxEngine
    from eelgrid_controller.kubernetes_composition import KubernetesRuntime
    from eelgrid_controller.runtime.postgresql.standby import JournalStandby
    from eelgrid_controller.server.http.admission_webhook import AdmissionWebhook
    from eelgrid_controller.server.remote_write.writer import RemoteWriter


# A cycle takes two seconds at most; a longer one must not keep the process from its last checkpoint.
_STEERING_STOP_S = 5.0


class Controller:
    """Runs one controller: start it, wait for it, stop it."""

    def __init__(
        self, config: ControllerConfig, *, tls: TlsFiles | None, insecure: bool, clock: Clock, log: logging.Logger
    ) -> None:
        self.config = config
        self._tls = tls
        self._insecure = insecure
        self._wall = WallClock(clock, log=log.getChild("clock"))
        self._clock = clock = self._wall.steady
        self._log = log
        self.metrics = ControllerMetrics()
        self.metrics.add(self._clock_families)
        self._is_serving = False
        self._ending: asyncio.Future[None] | None = None
        self.placing: KubernetesRuntime | None = None
        # This controller's time as a standby; None for one whose journal no other can lead.
        self.following: StandbyServer | None = None
        roles_log = log.getChild("roles")
        self._keeper = None if tls is None and not config.local_users else open_authorizer(config, clock, roles_log)
        if self._keeper is not None:
            self.metrics.add(self._keeper.families)
        keeper = self._keeper
        self._admit = admit_everybody if keeper is None else keeper.authorize_call
        self._callers = CallerService(
            None if keeper is None else keeper.identify_caller, demanded=config.roles.demanded
        )
        self.guard = PeerGuard(log=log.getChild("guard"), now_s=lambda: clock.now_ns() / 1e9)
        self.watches = LoopInstrumentation(self.metrics)
        self._stack = contextlib.AsyncExitStack()

    def _clock_families(self) -> Iterator[MetricFamily]:
        yield build_family("eelgrid_clock_jumps_total", self._wall.jumps)
        yield build_family("eelgrid_clock_jump_seconds", self._wall.jump_s)

    async def start(self) -> str:
        """Starts serving; returns the line that says where. Raises ControllerError or ListenError."""
        try:
            return await self._start()
        except BaseException:
            await self._stack.aclose()
            raise

    async def _start(self) -> str:
        self._traces_to = resolve_endpoint(self.config.traces, os.environ, self._log.getChild("tracing"))
        # In a thread, since it reads a database; the journal of one that others may lead is there when this one leads.
        standby = await asyncio.to_thread(
            follow_store,
            self.config.database,
            self.config.data,
            fresh_state=ClusterState,
            new_cluster_id=str(uuid.uuid4()),
            retained=self.config.retained_events,
            lease_s=self.config.lease_s,
        )
        journal = None if standby is not None else await self._open_store()
        server = grpc.aio.server(options=server_options())
        port = await listen_on_address(
            server,
            self.config.listen,
            tls=self._tls,
            insecure=self._insecure,
            log=self._log,
            guard=self.guard,
            is_shared=self.config.local_users,
        )
        self._stack.push_async_callback(self._await_server)
        self._stack.callback(asyncio.create_task(self.guard.run()).cancel)
        self._answer_probes()
        # From here on probes see that this process is live but not ready yet.
        metrics_port = await self._open_metrics()
        self.webhook = await self._gate_pods()
        self._kernels = kernels = await self._stack.enter_async_context(load_kernels(self._clock, self._log))
        self.metrics.add(lambda: (build_family("eelgrid_kernels_interpreted", float(kernels.is_interpreted)),))
        front = await self._open_front(server)
        if standby is not None:
            # Who leads must decide, and how many nodes there are is known once it leads.
            await kernels.wait_for_machine_code()
            journal = await self._follow(standby, server, front, port)
        assert journal is not None
        start_s = self._clock.perf_s()
        recovered = await self._compose(journal, None if standby is None else standby.recover)
        await kernels.wait_to_decide(len(recovered.state.nodes))
        seconds = self._clock.perf_s() - start_s
        handlers = await self._open_door(server, front)
        page_port = await self._serve_page()
        api_port = await self._serve_http_api(handlers)
        self.savings = self._count_savings()
        self.placing = await self._place_pods()
        self._steer_jobs()
        self._follow_ray()
        page = "" if page_port is None else f" page={replace_port(self.config.page, page_port)}"
        api = "" if api_port is None else f" http_api={replace_port(self.config.http_api, api_port)}"
        line = (
            f"serving listen={replace_port(self.config.listen, port)} "
            f"metrics={replace_port(self.config.metrics, metrics_port)} "
            f"nodes={len(recovered.state.nodes)} workloads={len(recovered.state.workloads)} "
            f"replayed={recovered.replayed} checkpoint={recovered.checkpoint_seq} seconds={seconds:.2f} "
            f"cluster={journal.cluster_id}{page}{api}"
        )
        self._log.info("event=%s", line)
        return line

    async def _open_store(self) -> AuditedJournal:
        """Opens the journal in this machine's files."""
        journal = await asyncio.to_thread(
            open_store,
            self.config.database,
            self.config.data,
            new_cluster_id=str(uuid.uuid4()),
            retained=self.config.retained_events,
            accepts_loss=self.config.accepts_journal_loss,
        )
        self._stack.callback(journal.close)
        return journal

    async def _await_server(self) -> None:
        """Waits for calls that were under way when the server was stopped: not before another controller may lead."""
        if self._ending is not None:
            await self._ending

    async def _follow(
        self, standby: "JournalStandby", server: grpc.aio.Server, front: GuardedHandlers, port: int
    ) -> AuditedJournal:
        """Follows whoever leads until this controller does; returns the journal."""
        self.following = StandbyServer(
            standby,
            server,
            front=front,
            reads=StaleReads(standby, self._callers, catalogue=catalogue.load_catalogue(), clock=self._clock),
            admit=self._admit,
            has_flux=self.config.flux,
            log=self._log.getChild("standby"),
        )
        # Rather now than while nobody leads: it takes 0.2 s.
        settle_interpreter()
        self._stack.push_async_callback(self.following.stop)
        self.metrics.add(self.following.families)
        journal = await self.following.wait_to_lead(self.config.advertise or name_address(self.config.listen, port))
        self._stack.callback(journal.close)
        return journal

    def _report_loss(self, journal: AuditedJournal) -> None:
        """Logs the lost journal entries; the loop records them before any other change."""
        if journal.lost is not None:
            self._log.critical(
                "journal=rolled_back first=%d last=%s action=accepted remedy='nodes that hold more than the journal "
                "knows are closed: eelctl doctor names them'",
                journal.lost.first,
                "unknown" if journal.lost.last is None else journal.lost.last,
            )
        elif self.config.accepts_journal_loss:
            self._log.warning(
                "journal=complete warning=--accept-journal-loss would pass the next loss over remedy='take it away'"
            )

    async def _adopt_placement(self) -> None:
        """Puts the configured placement policy in force, journaled like any other change."""
        wanted = self.config.placement
        current = await self.loop.read(lambda core: core.state.policy)
        if wanted is not None and wanted != current.placement:
            try:
                await self.loop.update_policy(replace(current, placement=wanted))
            except InvalidArgument as error:
                (found,) = error.violations
                raise ControllerConfigError(f"--policy: {found.problem}", found.remedy) from None

    async def _compose(self, journal: AuditedJournal, recover: Callable[[], RecoveredState] | None) -> RecoveredState:
        """Builds all internal parts, and recovers the state."""
        products = catalogue.load_catalogue()
        self.loop = ControllerLoop(
            journal=journal,
            fresh_state=ClusterState,
            make_core=partial(Core, catalogue=products, joins_doubted=journal.is_remote, **self.config.core_options),
            config=self.config,
            clock=self._clock,
            log=self._log.getChild("loop"),
            observe_decision=self.watches.on_decision,
            observe_commit=self.watches.on_write,
            kernels=self._kernels,
        )
        self._report_loss(journal)
        recovered = await self.loop.start(recover)
        self._stack.push_async_callback(self.loop.stop)
        self._begin_audit(journal)
        if self.config.is_engine_run:
            # The external usage in a journal is as old as the journal.
            await self.loop.expect_reports()
        await self._adopt_placement()
        self.telemetry = telemetry = Telemetry()
        self._serve_agents(telemetry)
        views = ResourceViews(
            telemetry=telemetry,
            decisions=self.loop.decisions,
            now_ns=self._clock.now_ns,
            monotonic_s=self._clock.monotonic_s,
        )
        self._begin_spending()
        page = self._begin_steering(telemetry, products)
        self.imagining = WhatIfRunner(loop=self.loop, catalogue=products, clock=self._clock)
        self.shadowing = ShadowRunner(loop=self.loop, clock=self._clock)
        self._stack.callback(self.shadowing.close)
        self._begin_operators(views)
        self.promises = ObjectiveService(loop=self.loop, steers=self.objectives, call_of=self.trail.describe_call)
        self.overviews = OverviewService(
            loop=self.loop,
            telemetry=telemetry,
            promises=self.objectives.promises,
            faults=self.agents.device_faults,
            ledger=self.ledger,
            spending=self.spending.statuses,
            clock=self._clock,
            log=self._log.getChild("overview"),
        )
        self._stack.callback(self.overviews.close)
        self.partitions = PartitionService(
            loop=self.loop,
            telemetry=telemetry,
            monotonic_s=self._clock.monotonic_s,
            log=self._log.getChild("partitions"),
            call_of=self.trail.describe_call,
        )
        self._stack.callback(self.partitions.close)
        if self._traces_to is not None:
            self._follow_placements(self._traces_to, journal.cluster_id)
        self._begin_metrics(views, page)
        return recovered

    def _begin_operators(self, views: ResourceViews) -> None:
        """Creates the services for operators, and starts to relay what jobs write and read."""
        self.reads = ReadService(self.loop.read, views, self._callers.view_for, partial(confirm_read, self.loop))
        self.operators = OperatorService(
            loop=self.loop,
            views=views,
            agents=self.agents,
            log=self._log.getChild("operators"),
            view_for=self._callers.view_for,
            origin_of=self.watches.origin,
            call_of=self.trail.describe_call,
        )
        self.job_streams = JobStreamService(
            loop=self.loop,
            agents=self.agents,
            changes=self.operators.changes,
            call_of=self.trail.describe_call,
            on_attach=self.trail.on_call_end,
        )

    def _begin_metrics(self, views: ResourceViews, page: ObjectiveMetrics) -> None:
        """Gives the metrics what they read."""
        loop = self.loop

        def summary() -> Summary:
            return views.recent_summary(loop.core)

        fleet = FleetMetrics(
            core=lambda: loop.core,
            summary=summary,
            telemetry=self.telemetry,
            monotonic_s=self._clock.monotonic_s,
            now_ns=self._clock.now_ns,
        )
        loop.listeners.append(fleet.on_commit)
        loop.listeners.append(IdleGaps(lambda: loop.core, self.metrics.idle_gap.observe).on_commit)
        self.metrics.attach(
            MetricSources(
                settled=lambda: loop.read(lambda _: None),
                summary=summary,
                shell=ShellMetrics(loop, self.agents, self.telemetry, self.guard).families,
                objectives=lambda: page.families(loop.core.state.workloads, loop.core.state.policy),
            )
        )
        self.metrics.add(fleet.families, reads_state=True)

    def _begin_audit(self, journal: AuditedJournal) -> None:
        """Starts the audit log of operators' calls."""
        keeper = self._keeper
        self.trail = AuditTrail(
            loop=self.loop,
            clock=self._clock,
            log=self._log.getChild("audit"),
            caller_of=None if keeper is None else keeper.identify_caller,
            count_refusal=(lambda _: None) if keeper is None else keeper.count_refusal,
        )
        journal.audit_table.rows_most = self.config.audit_rows_most
        self.audit = AuditService(journal=journal, trail=self.trail)
        self.metrics.add(self.trail.families)
        # Entries of the last second are written before the loop ends.
        self._stack.push_async_callback(self.trail.write)
        self._stack.callback(asyncio.create_task(self.trail.run()).cancel)

    def _serve_agents(self, telemetry: Telemetry) -> None:
        """Creates the service for agents, and feeds the energy ledger and long-term storage from it."""
        remote, keeper = self._write_remotely(), self._keeper
        registrations = RegistrationGuard(
            self.config.registrations_most,
            caller_of=None if keeper is None else keeper.identify_caller,
            monotonic_s=self._clock.monotonic_s,
        )
        self.metrics.add(registrations.families)
        self.agents = AgentService(
            loop=self.loop,
            telemetry=telemetry,
            energy=self._begin_energy(),
            log=self._log.getChild("agents"),
            monotonic_s=self._clock.monotonic_s,
            admit_node=None if keeper is None else keeper.authorize_node,
            register=registrations.check_registration,
            may_lead=self._is_elected,
        )
        if remote is not None:
            self.agents.batch_listeners.append(remote.on_batch)
            self.ledger.window_listeners.append(remote.on_window)

    def _is_elected(self) -> bool:
        """Whether Kubernetes' Lease is ours, where that says who leads."""
        return self.config.kubernetes is None or (self.placing is not None and self.placing.elector.term() is not None)

    def _begin_energy(self) -> LedgerWriter:
        """Starts the energy ledger; returns its writer."""
        loop = self.loop
        desk = LedgerWriter(
            partial(open_ledger_with, self.loop.journal, self.config.database, self.config.data),
            core=lambda: loop.core,
            clock=self._clock,
            log=self._log.getChild("energy"),
            bytes_most=self.config.ledger_bytes_most,
        )
        self.ledger = desk
        self.metrics.add(LedgerMetrics(desk, now_ns=self._clock.now_ns).families)
        keeping = asyncio.create_task(desk.run())

        async def stop() -> None:
            keeping.cancel()
            await asyncio.wait((keeping,), timeout=_STEERING_STOP_S)

        self._stack.push_async_callback(stop)
        return desk

    def _begin_spending(self) -> None:
        """Starts monitoring spending limits."""
        desk = SpendingMonitor(
            loop=self.loop,
            ledger=self.ledger,
            every_s=self.config.spend_s,
            clock=self._clock,
            log=self._log.getChild("spending"),
        )
        self.spending = desk
        self.energy = EnergyService(loop=self.loop, desk=self.ledger, spending=desk, clock=self._clock)
        day = EnergyDayMonitor(
            ledger=self.ledger,
            prices=lambda: self.loop.core.state.policy.prices,
            every_s=self.config.spend_s,
            clock=self._clock,
            log=self._log.getChild("energy"),
        )
        for monitor in (desk, day):
            self.metrics.add(monitor.families)
            self._stack.callback(asyncio.create_task(monitor.run()).cancel)

    def _begin_steering(self, telemetry: Telemetry, products: Catalogue) -> ObjectiveMetrics:
        """Starts the objectives loop; returns its metrics."""
        config, log = self.config, self._log.getChild("objectives")
        # A page must be complete before the next one is due.
        bounds = FetchLimits(whole_s=min(5.0, config.scrape_s), connect_s=min(2.0, config.scrape_s))
        is_allowed = is_loopback(config.listen) if config.scrape_loopback is None else config.scrape_loopback
        get = HttpFetcher(bounds, allows_loopback=is_allowed).get
        scraper = Scraper(get, every_s=config.scrape_s, monotonic_s=self._clock.monotonic_s, log=log)
        settings = ObjectiveSettings(
            cycle_s=config.steer_s,
            scrape_s=config.scrape_s,
            hold_s=config.scale_hold_s,
            cool_s=config.scale_hold_s / 5.0,
            window_s=config.job_window_s,
            missed_s=6.0 * config.job_window_s,
            away_grace_s=config.away_grace_s,
        )
        self.objectives = ControlLoop(
            loop=self.loop,
            telemetry=telemetry,
            pages=scraper,
            catalogue=products,
            settings=settings,
            clock=self._clock,
            log=log,
            durations=DurationObservers(self.metrics.turn.observe, self.metrics.division.observe),
            worked=self.ledger.add_work,
        )
        steering = asyncio.create_task(self.objectives.run())

        async def stop() -> None:
            steering.cancel()
            _, left = await asyncio.wait((steering,), timeout=_STEERING_STOP_S)
            if left:
                log.error("steering=running seconds=%g action=left_behind", _STEERING_STOP_S)

        self._stack.push_async_callback(stop)
        return ObjectiveMetrics(self.objectives, scraper)

    def _answer_probes(self) -> None:
        """Starts the probe server in a thread of its own, if configured."""
        beat = Heartbeat(self._clock.monotonic_s)
        beating = asyncio.create_task(beat.run())
        self._stack.callback(beating.cancel)
        if not self.config.probes:
            return
        server = ProbeServer(
            fault=beat.fault,
            unready=lambda: "" if self._is_serving else "not serving",
            log=self._log.getChild("probes"),
        )
        try:
            server.start(self.config.probes)
        except (OSError, ValueError) as error:
            raise ControllerConfigError(f"--probes {self.config.probes}: {error}", "write another HOST:PORT") from error
        self._stack.callback(server.close)

    async def _open_metrics(self) -> int:
        door = ControllerMetricsServer(
            self.metrics,
            is_ready=lambda: self._is_serving,
            insecure=self._insecure,
            log=self._log.getChild("metrics"),
            host_names=self.config.metrics_hosts,
        )
        port = await door.start(self.config.metrics)
        self._stack.push_async_callback(door.stop)
        lag = asyncio.create_task(self.metrics.measure_loop_lag())
        self._stack.callback(lag.cancel)
        return port

    async def _open_front(self, server: grpc.aio.Server) -> GuardedHandlers:
        """Prepares to serve gRPC: health and reflection; returns what the services are added to."""
        front = self.guard.wrap_handlers()
        self._health = await standard_services(front, list_services(has_flux=self.config.flux))
        server.add_generic_rpc_handlers((front,))
        return front

    async def _open_door(self, server: grpc.aio.Server, front: GuardedHandlers) -> GuardedHandlers:
        """Begins to serve all calls; returns their handlers."""
        omissions = OmissionCounter(monotonic_s=self._clock.monotonic_s, log=self._log.getChild("answers"))
        self.metrics.add(omissions.families)
        operators = (
            self.operators,
            self.reads,
            self.job_streams,
            self.overviews,
            self.promises,
            self.partitions,
            self.energy,
            self.audit,
            self.imagining,
            self.shadowing,
            self._callers,
        )
        around: dict[str, Any] = {
            "admit": self._admit,
            "omitted": omissions.record_omission,
            "settled": self.trail.on_call_end,
        }
        flux = {} if (engine := self._schedule_flux()) is None else {FLUX_SERVICE: engine}
        agents, log = build_handler(AGENT_SERVICE, self.agents, **around), self._log.getChild("ingest")
        ingest = build_ingest_service(self.agents, agents, keeper=self._keeper, tls=self._tls, log=log)
        self.metrics.add(ingest.families)
        handlers = (
            agents,
            build_handler(INGEST_SERVICE, ingest, **around),
            build_handler(OPERATOR_SERVICE, *operators, **around),
            *(build_handler(service, engine, **around) for service, engine in flux.items()),
        )
        front.replace_handlers(() if self.following is None else self.following.handlers, handlers)
        if self.following is None:
            await server.start()
        await self._health.set_serving(True)
        self._is_serving = True

        async def close() -> None:
            self._is_serving = False
            await self._health.set_serving(False)
            self.agents.close()
            self.operators.close()
            self.job_streams.close()
            self._ending = asyncio.ensure_future(server.stop(self.config.stop_s))
            if not self.loop.journal.is_remote:
                await self._ending

        self._stack.push_async_callback(close)
        return front

    # Parts that run only if they are configured

    async def _gate_pods(self) -> "AdmissionWebhook | None":
        """Starts answering admission reviews of the API server; needs no other part."""
        if self.config.kubernetes is None or (wanted := self.config.kubernetes.webhook) is None:
            return None
        from eelgrid_controller.server.http.admission_webhook import AdmissionWebhook

        files = KeyPairFiles(wanted.certificate, wanted.key)
        webhook = AdmissionWebhook(wanted.rules, files, log=self._log.getChild("webhook"))
        self.metrics.add(webhook.families)
        await webhook.start(wanted.listen)
        self._stack.push_async_callback(webhook.stop)
        return webhook

    def _follow_placements(self, endpoint: CollectorEndpoint, instance: str) -> None:
        """Exports traces of placements to a collector."""
        self.watches.tracing = tracing = Tracing(
            endpoint,
            instance=instance,
            now_ns=self._clock.now_ns,
            has_agent=self.agents.is_node_reported,
            log=self._log.getChild("tracing"),
        )
        state = self.loop.core.state
        tracing.traces.resume_traces(state.workloads[key] for key in state.pending)
        self.loop.listeners.append(tracing.traces.on_commit)
        self.agents.listeners.append(tracing.traces.on_plan_message)
        self.metrics.add(tracing.families)
        self._stack.push_async_callback(tracing.stop)

    def _write_remotely(self) -> "RemoteWriter | None":
        """Starts to write series to long-term storage; to be stopped after whatever hands some over."""
        if self.config.remote_write is None:
            return None
        from eelgrid_controller.server.remote_write.writer import RemoteWriter

        writer = RemoteWriter(
            self.config.remote_write,
            instance=name_address(self.config.metrics, int(self.config.metrics.rpartition(":")[2])),
            is_leading=self._is_elected,
            clock=self._clock,
            log=self._log.getChild("remote_write"),
        )
        self._stack.push_async_callback(asyncio.to_thread, writer.stop)
        self._stack.callback(asyncio.create_task(writer.read_pages(self.metrics.read_families)).cancel)
        self.metrics.add(writer.families)
        return writer

    async def _serve_page(self) -> int | None:
        """Serves the live page; returns its port."""
        if not self.config.page:
            return None
        from eelgrid_controller.server.http.live_hub import LiveHub, LoopSource
        from eelgrid_controller.server.http.live_server import LiveServer

        log, admit = self._log.getChild("page"), None if self._keeper is None else self._keeper.authorize_viewer
        source = LoopSource(
            self.loop,
            self.telemetry,
            promises=self.objectives.promises,
            budgets=self.objectives.budgets,
            overview=self.overviews.overview,
            idle_gpus=self.overviews.idle_gpus,
            clock=self._clock,
        )
        hub = LiveHub(source, log=log)
        door = LiveServer(hub, source, tls=self._tls, insecure=self._insecure, log=log, admit=admit)
        port = await door.start(self.config.page)
        self.loop.listeners.append(hub.on_commit)
        self._stack.push_async_callback(door.stop)
        return port

    async def _serve_http_api(self, handlers: GuardedHandlers) -> int | None:
        """Serves the HTTP API by the handlers of gRPC; returns its port."""
        if not self.config.http_api:
            return None
        from eelgrid_controller.server.http.gateway import HttpGateway

        gateway = HttpGateway(
            handlers.find_call,
            tls=self._tls,
            insecure=self._insecure,
            now_ns=self._clock.now_ns,
            log=self._log.getChild("http_api"),
        )
        port = await gateway.start(self.config.http_api)
        self._stack.push_async_callback(gateway.stop)
        return port

    def _count_savings(self) -> SavingsMonitor | None:
        """Starts the monitor of what placement saves compared with best fit."""
        if not self.config.savings:
            return None
        log = self._log.getChild("savings")
        desk = SavingsMonitor(loop=self.loop, catalogue=catalogue.load_catalogue(), clock=self._clock, log=log)
        self.metrics.add(desk.families)
        self._stack.callback(asyncio.create_task(desk.run()).cancel)
        return desk

    async def _place_pods(self) -> "KubernetesRuntime | None":
        """Starts the placement of a cluster's pods."""
        if self.config.kubernetes is None:
            return None
        from eelgrid_controller.engines.kubernetes.model.power_policy import PlacePower
        from eelgrid_controller.engines.kubernetes.reconcilers.core_commands import is_gate_workload
        from eelgrid_controller.engines.kubernetes.reconcilers.related_objects import PodUsers
        from eelgrid_controller.kubernetes_composition import KubernetesRuntime

        objectives = self.objectives
        placing = KubernetesRuntime(
            self.config.kubernetes,
            loop=self.loop,
            has_agent=self.agents.is_node_reported,
            awaits_agent=self.agents.is_report_pending,
            foresees=objectives.foresees,
            data=self.config.data,
            draws=lambda: {
                key: PlacePower(one.measured_w or 0.0, one.gpus - one.measured_gpus)
                for key, one in objectives.budget_power().items()
            },
            devices=self.agents.devices,
            clock=self._clock,
            log=self._log.getChild("kubernetes"),
            promises=objectives.promises,
        )
        self.metrics.add(placing.families)
        if self.webhook is not None and self.config.kubernetes.pins_at_admission:
            self.webhook.find_pin = placing.engine.find_pin
        if self.watches.tracing is not None:
            self.watches.tracing.follow_pods(placing.engine.writes.listeners, is_gate_workload)
        users = PodUsers()
        placing.engine.add_pod_listener(users.on_deltas)
        self.ledger.user_of_pod = users.user_of
        await placing.start()
        self._stack.push_async_callback(placing.stop)
        return placing

    def _steer_jobs(self) -> None:
        """Starts to steer the jobs of a Slurm cluster."""
        wanted = self.config.slurm
        if wanted is None:
            return
        from eelgrid_controller.engines.slurm.commands import SlurmCommandLine
        from eelgrid_controller.engines.slurm.engine import SlurmEngine, SlurmSettings
        from eelgrid_controller.engines.slurm.power_saving import read_power_saving
        from eelgrid_controller.engines.slurm.steering import SteeringSettings

        log = self._log.getChild("slurm")
        environment = {} if wanted.conf is None else {"SLURM_CONF": str(wanted.conf)}
        commands = SlurmCommandLine(folder=wanted.commands, environment=environment)
        if wanted.rest:
            from eelgrid_controller.engines.slurm.rest import SlurmRest, SlurmRestReader

            rest = SlurmRest(wanted.rest, token_file=wanted.rest_token_file, user=wanted.rest_user)
            commands = SlurmRestReader(
                rest, clock=self._clock, log=log, folder=wanted.commands, environment=environment
            )
            self._stack.push_async_callback(rest.close)
        engine = SlurmEngine(
            commands,
            loop=self.loop,
            has_agent=self.agents.is_node_reported,
            settings=SlurmSettings(
                poll_s=wanted.poll_s,
                lease=wanted.lease if wanted.mode == "steer" else None,
                advises=wanted.mode == "advise",
                lease_s=wanted.lease_s,
                steering=SteeringSettings(patience_s=wanted.patience_s),
                power_saving=read_power_saving(wanted),
                cuts_slices=wanted.mig_layouts,
            ),
            clock=self._clock,
            log=log,
        )
        self._stack.callback(engine.end_lease)
        self._stack.push_async_callback(engine.take_back_advice)
        self._stack.callback(asyncio.create_task(engine.run()).cancel)

    def _schedule_flux(self) -> "FluxEngine | None":
        """Starts to schedule the jobs of a Flux instance, once its module connects."""
        if not self.config.flux:
            return None
        from eelgrid_controller.engines.flux.engine import FluxEngine

        engine = FluxEngine(
            loop=self.loop, has_agent=self.agents.is_node_reported, clock=self._clock, log=self._log.getChild("flux")
        )
        self._stack.callback(asyncio.create_task(engine.run()).cancel)
        return engine

    def _follow_ray(self) -> None:
        """Starts to follow a Ray cluster."""
        wanted = self.config.ray
        if wanted is None:
            return
        from eelgrid_controller.engines.ray.dashboard import RayDashboard
        from eelgrid_controller.engines.ray.engine import RayEngine, RaySettings
        from eelgrid_controller.engines.ray.following import FollowingSettings

        engine = RayEngine(
            RayDashboard(wanted.address, token_file=wanted.token_file),
            loop=self.loop,
            has_agent=self.agents.is_node_reported,
            settings=RaySettings(poll_s=wanted.poll_s, following=FollowingSettings(patience_s=wanted.patience_s)),
            clock=self._clock,
            log=self._log.getChild("ray"),
        )
        self._stack.callback(asyncio.create_task(engine.run()).cancel)

    async def stop(self) -> None:
        """Stops accepting calls, finishes those in progress and writes a checkpoint."""
        await self._stack.aclose()
