"""eelgrid-front: the command line of a front of several clusters, its signals and its exit codes."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import click
import grpc.aio

from eelgrid_controller.clock import Clock
from eelgrid_controller.errors import ControllerConfigError, ControllerError
from eelgrid_controller.federation.cluster_clients import MemberCluster
from eelgrid_controller.federation.dispatcher import Dispatcher, DispatchSettings
from eelgrid_controller.federation.front_service import FrontService, OtherCalls
from eelgrid_controller.federation.ranking import ClusterOffer, RankedOffer, RankingWeights, rank_offers
from eelgrid_controller.federation.record_store import RecordStore
from eelgrid_controller.runtime.access_control import parse_bindings, parse_user_grants
from eelgrid_controller.server.grpc.authorization import Authorizer, CallerService
from eelgrid_protos import __version__
from eelgrid_protos.catalogue import load_catalogue
from eelgrid_protos.connection_limits import PeerGuard
from eelgrid_protos.log_lines import log_to_stderr
from eelgrid_protos.messages import CLUSTERS_MOST, WorkloadSpec
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
        log: logging.Logger,
    ) -> None:
        self.clock = Clock()
        self._tls, self._insecure, self._rules, self._log = tls, insecure, rules, log
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
        keeper = None
        if self._tls is not None:
            keeper = Authorizer(self._rules, clock=self.clock, log=self._log.getChild("roles"))
        caller_of = None if keeper is None else keeper.identify_caller
        admit = admit_everybody if keeper is None else keeper.authorize_call
        service = FrontService(self.dispatcher, self._clients, caller_of=caller_of, rules=self._rules, clock=self.clock)
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
        host = listen.rpartition(":")[0]
        line = f"serving listen={host}:{port} clusters={','.join(self._clients)} workloads={self.dispatcher.live}"
        self._log.info("event=%s", line)
        return line

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
        asyncio.run(
            _serve(
                given["listen"],
                clusters=parse_clusters(given["clusters"]),
                data=given["data"],
                tls=tls,
                insecure=given["insecure"],
                rules=rules,
                settings=DispatchSettings(move_after_s=given["move_after"]),
                weights=RankingWeights(
                    wait_price_per_gpu_h=given["wait_price"], carbon_price_per_kg=given["carbon_price"]
                ),
                timeout_s=given["call_timeout"],
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
