"""eelgrid-front: the command line of a front of several clusters, its signals and its exit codes."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import click
import grpc.aio

from eelgrid_controller.clock import Clock
from eelgrid_controller.errors import ControllerConfigError, ControllerError
from eelgrid_controller.federation.cluster_clients import MemberCluster
from eelgrid_controller.federation.dispatch import Dispatch
from eelgrid_controller.federation.dispatcher import Dispatcher, DispatchSettings
from eelgrid_controller.federation.front_service import FrontService, OtherCalls
from eelgrid_controller.federation.ranking import ClusterOffer, RankedOffer, RankingWeights, rank_offers
from eelgrid_controller.federation.record_store import RecordStore
from eelgrid_controller.runtime.access_control import parse_bindings, parse_user_grants
from eelgrid_controller.server.grpc.authorization import Authorizer, CallerService
from eelgrid_controller.server.http.metrics_server import ControllerMetrics, ControllerMetricsServer
from eelgrid_controller.server.metrics.catalogue import build_family
from eelgrid_protos import __version__
from eelgrid_protos.catalogue import load_catalogue
from eelgrid_protos.connection_limits import PeerGuard
from eelgrid_protos.log_lines import log_to_stderr
from eelgrid_protos.messages import CLUSTERS_MOST, WorkloadSpec
from eelgrid_protos.openmetrics import MetricFamily
from eelgrid_protos.operator_calls import parse_addresses
from eelgrid_protos.roles import RoleRules
from eelgrid_protos.rpc import FEDERATION_SERVICE, OPERATOR_SERVICE, admit_everybody, build_handler
from eelgrid_protos.sockets import raise_descriptor_limit
from eelgrid_protos.transport import (
    ListenError,
    TlsFiles,
    TlsFilesIncomplete,
    collect_tls_files,
    listen_on_address,
    server_options,
    standard_services,
)

_UMASK = 0o027
_STOP_S = 5.0
_URL_LETTERS_MOST = 200


def parse_clusters(texts: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Parses NAME=HOST:PORT[,HOST:PORT...]; raises ControllerConfigError."""
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, equals, addresses = text.partition("=")
        if not equals or not name.replace("-", "").replace(".", "").isalnum() or name in found:
            raise ControllerConfigError(
                f"cluster {text!r} has no name of its own",
                "write NAME=HOST:PORT, each name once: letters, digits, - and .",
            )
        try:
            found[name] = parse_addresses(addresses)
        except ValueError as error:
            raise ControllerConfigError(f"cluster {name}", str(error)) from None
    if not 1 <= len(found) <= CLUSTERS_MOST:
        raise ControllerConfigError(f"cluster is given {len(found)} times", f"give it 1 to {CLUSTERS_MOST} times")
    return found


def parse_page_urls(texts: tuple[str, ...], clusters: Collection[str]) -> dict[str, str]:
    """Parses NAME=URL of clusters' own pages; raises ControllerConfigError."""
    found: dict[str, str] = {}
    for text in texts:
        name, _, url = text.partition("=")
        if name not in clusters or not url.startswith(("https://", "http://")) or len(url) > _URL_LETTERS_MOST:
            raise ControllerConfigError(
                f"page-of {text!r} is no address of a cluster's page",
                f"write NAME=https://HOST:PORT/ with one of the clusters {', '.join(clusters)}",
            )
        found[name] = url
    return found


class Front:
    """One front, from `start` until `stop`."""

    def __init__(
        self,
        clusters: dict[str, tuple[str, ...]],
        data: Path,
        *,
        tls: TlsFiles | None,
        insecure: bool,
        rules: RoleRules,
        settings: DispatchSettings,
        weights: RankingWeights,
        timeout_s: float,
        metrics: str,
        metrics_hosts: tuple[str, ...],
        page: str,
        page_urls: dict[str, str],
        log: logging.Logger,
    ) -> None:
        self.clock = Clock()
        self._tls, self._insecure, self._rules, self._log = tls, insecure, rules, log
        self.metrics = ControllerMetrics()
        self._metrics_at, self._metrics_hosts = metrics, metrics_hosts
        self._page_at, self._page_urls = page, page_urls
        self._is_serving = False
        self._store = RecordStore(data, settled_most=settings.settled_most)
        self._clients = {
            name: MemberCluster(
                name, addresses, tls=tls, insecure=insecure, timeout_s=timeout_s, now_ns=self.clock.now_ns
            )
            for name, addresses in clusters.items()
        }
        busy_w = {one.model: one.busy_w for one in load_catalogue().products.values()}

        def rank(spec: WorkloadSpec, offers: Any) -> tuple[RankedOffer, ...]:
            found: list[ClusterOffer] = list(offers)
            return rank_offers(spec, found, busy_w=busy_w, weights=weights, now_ns=self.clock.now_ns())

        self.dispatcher = Dispatcher(
            self._clients, self._store, rank=rank, clock=self.clock, settings=settings, log=log.getChild("dispatch")
        )
        self._stack = contextlib.AsyncExitStack()

    async def start(self, listen: str) -> str:
        """Takes up the records and serves; returns the line that says where. Raises ControllerError and ListenError."""
        server = grpc.aio.server(options=server_options())
        guard = PeerGuard(log=self._log.getChild("guard"))
        port = await listen_on_address(
            server, listen, tls=self._tls, insecure=self._insecure, log=self._log, guard=guard
        )
        self._stack.callback(asyncio.create_task(guard.run()).cancel)
        for client in self._clients.values():
            self._stack.push_async_callback(client.close)
        self._stack.push_async_callback(self._store.close)
        self._stack.push_async_callback(self.dispatcher.stop)
        await self.dispatcher.start()
        metrics_port = await self._open_metrics()
        keeper = None
        if self._tls is not None:
            keeper = Authorizer(self._rules, clock=self.clock, log=self._log.getChild("roles"))
        caller_of = None if keeper is None else keeper.identify_caller
        admit = admit_everybody if keeper is None else keeper.authorize_call
        service = FrontService(
            self.dispatcher,
            self._clients,
            caller_of=caller_of,
            rules=self._rules,
            clock=self.clock,
            page_urls=self._page_urls,
        )
        page_port = await self._open_page(service, None if keeper is None else keeper.authorize_viewer)
        callers = CallerService(caller_of, demanded=self._rules.demanded)
        handlers = guard.wrap_handlers()
        health = await standard_services(handlers, (OPERATOR_SERVICE, FEDERATION_SERVICE))
        server.add_generic_rpc_handlers((handlers,))
        handlers.add_generic_rpc_handlers(
            (
                build_handler(OPERATOR_SERVICE, service, callers, OtherCalls(service, callers), admit=admit),
                build_handler(FEDERATION_SERVICE, service, admit=admit),
            )
        )
        await server.start()
        self._stack.push_async_callback(server.stop, _STOP_S)
        await health.set_serving(True)
        self._is_serving = True
        host, metrics_host = listen.rpartition(":")[0], self._metrics_at.rpartition(":")[0]
        metrics = f" metrics={metrics_host}:{metrics_port}" if metrics_port else ""
        page = f" page={self._page_at.rpartition(':')[0]}:{page_port}" if page_port else ""
        where = f"listen={host}:{port}{metrics}{page}"
        line = f"serving {where} clusters={','.join(self._clients)} workloads={self.dispatcher.live}"
        self._log.info("event=%s", line)
        return line

    async def _open_metrics(self) -> int:
        """Serves /metrics and the probes, and watches the clusters; returns the port, 0 without an address."""
        for client in self._clients.values():
            self._stack.callback(asyncio.create_task(client.watch()).cancel)
        if not self._metrics_at:
            return 0
        self.metrics.add(self.dispatcher.families)
        self.metrics.add(self._tell_clusters)
        door = ControllerMetricsServer(
            self.metrics,
            is_ready=lambda: self._is_serving,
            insecure=self._insecure,
            log=self._log.getChild("metrics"),
            host_names=self._metrics_hosts,
        )
        port = await door.start(self._metrics_at)
        self._stack.push_async_callback(door.stop)
        self._stack.callback(asyncio.create_task(self.metrics.measure_loop_lag()).cancel)
        return port

    async def _open_page(self, service: FrontService, admit: Callable[[bytes | None], None] | None) -> int:
        """Serves the page of all clusters; returns the port, 0 without an address."""
        if not self._page_at:
            return 0
        from eelgrid_controller.federation.front_page import HEADERS, FrontPage
        from eelgrid_controller.server.http.live_server import PAGE_SETTINGS, ViewerEndpoint

        def find_dispatch(key: str) -> Dispatch | None:
            record = self.dispatcher.find(key)
            return None if record is None else record.dispatch

        endpoint = ViewerEndpoint(
            PAGE_SETTINGS,
            tls=self._tls,
            insecure=self._insecure,
            now_ns=self.clock.now_ns,
            log=self._log.getChild("page"),
            admit=admit,
        )
        port = await endpoint.start(self._page_at, FrontPage(service, find_dispatch, self.clock).routes, HEADERS)
        self._stack.push_async_callback(endpoint.stop)
        return port

    def _tell_clusters(self) -> Iterator[MetricFamily]:
        known = {name: float(one.is_up) for name, one in self._clients.items() if one.is_up is not None}
        yield build_family("eelgrid_front_cluster_up", known)

    async def stop(self) -> None:
        """Stops serving; what is under way is taken up again by the next start."""
        await self._stack.aclose()


async def _serve(listen: str, **parts: Any) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    front = Front(**parts)
    try:
        click.echo(await front.start(listen))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait((stopped, front.dispatcher.failed), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
    finally:
        await front.stop()
    if front.dispatcher.failed.done():
        raise ControllerError(
            f"an internal error ({front.dispatcher.failed.result()})",
            "see the log for details, and start the front again; no workload is placed twice",
        )


@click.command(context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "EELGRID_FRONT"})
@click.option("--listen", default="127.0.0.1:7445", show_default=True, help="Address of the gRPC server.")
@click.option(
    "--cluster",
    "clusters",
    multiple=True,
    required=True,
    metavar="NAME=HOST:PORT[,HOST:PORT...]",
    help="A cluster, and the address of its controller, or of several of which one leads. Repeatable.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    default=Path("eelgrid-front-data"),
    show_default=True,
    help="Directory of the records: which cluster has which workload.",
)
@click.option(
    "--metrics",
    default="127.0.0.1:9467",
    show_default=True,
    metavar="HOST:PORT",
    help="Address of /metrics and of the probes; empty for none.",
)
@click.option(
    "--metrics-host",
    "metrics_hosts",
    multiple=True,
    metavar="NAME",
    help="Host name under which /metrics is scraped, in addition to addresses, localhost and this machine's name. Repeatable.",
)
@click.option(
    "--page",
    default="",
    metavar="HOST:PORT",
    help="Address of the page of all clusters; with TLS, viewers need a certificate. None by default.",
)
@click.option(
    "--page-of",
    "page_urls",
    multiple=True,
    metavar="NAME=URL",
    help="The address of a cluster's own live page, which the page links to. Repeatable.",
)
@click.option("--tls-certificate", type=click.Path(path_type=Path), help="Certificate chain of the front, PEM.")
@click.option("--tls-key", type=click.Path(path_type=Path), help="Private key of that certificate, PEM.")
@click.option(
    "--tls-authority",
    type=click.Path(path_type=Path),
    help="CA that signs the certificates of clients and of the clusters' controllers, PEM.",
)
@click.option("--insecure", is_flag=True, help="Listen on and connect to other machines without TLS.")
@click.option(
    "--call-timeout",
    type=click.FloatRange(0.1, 60.0),
    default=2.0,
    show_default=True,
    help="Seconds that a cluster may take for one answer; a slower one is left out of the decision.",
)
@click.option(
    "--wait-price",
    type=click.FloatRange(0.0, 1000.0),
    default=RankingWeights().wait_price_per_gpu_h,
    show_default=True,
    help="What an hour in which the work of one GPU waits costs, in the currency of the clusters' prices.",
)
@click.option(
    "--carbon-price",
    type=click.FloatRange(0.0, 1000.0),
    help="Price of a kilogram of carbon dioxide, the same for all clusters; by default what each cluster's policy says.",
)
@click.option(
    "--move-after",
    type=click.FloatRange(0.0, 604_800.0),
    default=DispatchSettings().move_after_s,
    show_default=True,
    help="Seconds after which work that still waits goes to a cluster where it would start now; 0 for never.",
)
@click.option(
    "--grant", "grants", multiple=True, metavar="ROLE=KIND:NAME", help="As that of eelgrid-controller. Repeatable."
)
@click.option(
    "--bind", "binds", multiple=True, metavar="RIGHT=KIND:NAME", help="As that of eelgrid-controller. Repeatable."
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="Minimum level of log records on standard error.",
)
@click.version_option(__version__, prog_name="eelgrid-front")
def main(**given: Any) -> None:
    """Place workloads into one of several clusters, each of which keeps its own controller.

    Certificates of callers need a role. The exit code is 0 after SIGTERM or SIGINT, 2 if an option, a file or an address
    cannot be used, and 1 after any other failure.
    """
    try:
        try:
            tls = collect_tls_files(given["tls_certificate"], given["tls_key"], given["tls_authority"])
        except TlsFilesIncomplete:
            raise click.UsageError(
                "--tls-certificate, --tls-key and --tls-authority belong together: give all three, or none"
            ) from None
        # A certificate without a role would be let in here and then act with the front's rights elsewhere.
        rules = RoleRules(
            demanded=tls is not None, grants=parse_user_grants(given["grants"]), binds=parse_bindings(given["binds"])
        )
        if not logging.getLogger().handlers:
            log_to_stderr(logging.getLogger(), given["log_level"].upper())
        raise_descriptor_limit()
        os.umask(_UMASK)
        clusters = parse_clusters(given["clusters"])
        asyncio.run(
            _serve(
                given["listen"],
                clusters=clusters,
                data=given["data"],
                tls=tls,
                insecure=given["insecure"],
                rules=rules,
                settings=DispatchSettings(move_after_s=given["move_after"]),
                weights=RankingWeights(
                    wait_price_per_gpu_h=given["wait_price"], carbon_price_per_kg=given["carbon_price"]
                ),
                timeout_s=given["call_timeout"],
                metrics=given["metrics"],
                page=given["page"],
                page_urls=parse_page_urls(given["page_urls"], clusters),
                metrics_hosts=given["metrics_hosts"],
                log=logging.getLogger("eelgrid.front"),
            )
        )
    except (ControllerConfigError, ListenError) as error:
        click.echo(f"eelgrid-front: {error}", err=True)
        sys.exit(2)
    except ControllerError as error:
        click.echo(f"eelgrid-front: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
