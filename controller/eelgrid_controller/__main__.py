"""eelgrid-controller: flags, signals, and how errors look.

Owns the command line and the life of the process. Knows of the controller only
how it is started and stopped (composition.py).
"""

import asyncio
import logging
import signal
import sys
import time
from pathlib import Path

import click

from eelgrid_controller.clock import Clock
from eelgrid_controller.config import ControllerConfig, KubernetesConfig
from eelgrid_controller.errors import ConfigError, ControllerError
from eelgrid_protos import __version__
from eelgrid_protos.transport import ListenError, TlsFiles

__all__ = ["main"]


async def _serve(config: ControllerConfig, *, tls: TlsFiles | None, insecure: bool) -> None:
    # numba takes a second to import, which --help and a wrong flag need not wait for.
    from eelgrid_controller.composition import Controller

    log = logging.getLogger("eelgrid.controller")
    stop = asyncio.Event()
    running = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        running.add_signal_handler(number, stop.set)
    controller = Controller(config, tls=tls, insecure=insecure, clock=Clock(), log=log)
    starting = asyncio.create_task(controller.start())
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait((starting,))
        return
    line = await starting
    # The one line on standard output; programs that start a controller wait for it.
    click.echo(line)
    failed = controller.loop.failed
    await asyncio.wait((stopped, failed), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    start_s = time.perf_counter()
    await controller.stop()
    log.info("stopped seconds=%.2f", time.perf_counter() - start_s)
    if failed.done():
        error = failed.result()
        raise (
            error
            if isinstance(error, ControllerError)
            else ControllerError(
                f"a fault in the controller ({error})",
                "its log has the details; start it again, nothing accepted is lost",
            )
        )


def _tls(certificate: Path | None, key: Path | None, authority: Path | None) -> TlsFiles | None:
    if certificate is None and key is None and authority is None:
        return None
    if certificate is None or key is None or authority is None:
        raise click.UsageError("give --tls-certificate, --tls-key and --tls-authority together, or none of them")
    return TlsFiles(certificate, key, authority)


_DEFAULTS = ControllerConfig(data=Path("eelgrid-data"))
_KUBERNETES = KubernetesConfig()


@click.command(context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "EELGRID_CONTROLLER"})
@click.option("--listen", default=_DEFAULTS.listen, show_default=True, help="Address of the gRPC server.")
@click.option("--metrics", default=_DEFAULTS.metrics, show_default=True, help="Address of /metrics and probes.")
@click.option(
    "--data", type=click.Path(path_type=Path), default=_DEFAULTS.data, show_default=True, help="Journal's directory."
)
@click.option("--tls-certificate", type=click.Path(path_type=Path), help="Our certificate chain, PEM.")
@click.option("--tls-key", type=click.Path(path_type=Path), help="Its private key, PEM.")
@click.option("--tls-authority", type=click.Path(path_type=Path), help="Whom to trust, PEM.")
@click.option("--insecure", is_flag=True, help="Listen beyond this machine without TLS.")
@click.option("--away-grace", type=float, default=_DEFAULTS.away_grace_s, show_default=True,
              help="Seconds that an agent may be away before its node counts as lost.")  # fmt: skip
@click.option("--restart-grace", type=float, default=_DEFAULTS.restart_grace_s, show_default=True,
              help="The same after a start of the controller.")  # fmt: skip
@click.option("--policy", metavar="NAME", help="Placement policy to go over to: eelgrid, fgd, pwr, pwr200, ...")
@click.option("--steer-interval", type=float, default=_DEFAULTS.steer_s, show_default=True,
              help="Seconds between two looks at what was promised.")  # fmt: skip
@click.option("--scrape-interval", type=float, default=_DEFAULTS.scrape_s, show_default=True,
              help="Seconds between two scrapes of a service's own metrics.")  # fmt: skip
@click.option("--scale-hold", type=float, default=_DEFAULTS.scale_hold_s, show_default=True,
              help="Seconds for which fewer replicas must have been enough.")  # fmt: skip
@click.option("--job-window", type=float, default=_DEFAULTS.job_window_s, show_default=True,
              help="Seconds for which a job is measured at a power limit.")  # fmt: skip
@click.option("--kubernetes", is_flag=True, help="Place the gated pods of a Kubernetes cluster.")
@click.option("--kubeconfig", default="", metavar="FILE", help="Its kubeconfig; else the pod's own service account.")
@click.option("--kubernetes-context", default="", metavar="NAME", help="Context of the kubeconfig.")
@click.option("--kubernetes-namespace", default="", metavar="NAME", help="Where the Lease lies, by which one leads.")
@click.option("--kubernetes-lease-name", default=_KUBERNETES.lease_name, show_default=True, help="Name of the Lease.")
@click.option("--kubernetes-identity", default="", metavar="NAME", help="How the Lease names this process alone.")
@click.option("--kubernetes-lease", type=float, default=_KUBERNETES.lease_s, show_default=True,
              help="Seconds after which another may lead in the stead of one that is silent.")  # fmt: skip
@click.option("--unbound-after", type=float, default=_KUBERNETES.unbound_s, show_default=True,
              help="Seconds after which a pinned pod that cannot be scheduled is made anew by its owner.")  # fmt: skip
@click.option("--fail-open-after", type=float,
              help="Seconds without any leader after which gates are removed without a plan; never, if not given.")  # fmt: skip
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info",
              show_default=True, help="Log to standard error from this level on.")  # fmt: skip
@click.version_option(__version__, prog_name="eelgrid-controller")
def main(
    *,
    listen: str,
    metrics: str,
    data: Path,
    tls_certificate: Path | None,
    tls_key: Path | None,
    tls_authority: Path | None,
    insecure: bool,
    away_grace: float,
    restart_grace: float,
    policy: str | None,
    steer_interval: float,
    scrape_interval: float,
    scale_hold: float,
    job_window: float,
    kubernetes: bool,
    kubeconfig: str,
    kubernetes_context: str,
    kubernetes_namespace: str,
    kubernetes_lease_name: str,
    kubernetes_identity: str,
    kubernetes_lease: float,
    unbound_after: float,
    fail_open_after: float | None,
    log_level: str,
) -> None:
    """Place and power GPU work; serve agents and operators over gRPC."""
    logging.basicConfig(
        level=log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    tls = _tls(tls_certificate, tls_key, tls_authority)
    try:
        cluster = KubernetesConfig(
            kubeconfig=kubeconfig,
            context=kubernetes_context,
            namespace=kubernetes_namespace,
            lease_name=kubernetes_lease_name,
            identity=kubernetes_identity,
            lease_s=kubernetes_lease,
            unbound_s=unbound_after,
            open_s=fail_open_after,
        )
        config = ControllerConfig(
            kubernetes=cluster if kubernetes else None,
            listen=listen,
            metrics=metrics,
            data=data,
            away_grace_s=away_grace,
            restart_grace_s=restart_grace,
            placement=policy,
            steer_s=steer_interval,
            scrape_s=scrape_interval,
            scale_hold_s=scale_hold,
            job_window_s=job_window,
        )
        asyncio.run(_serve(config, tls=tls, insecure=insecure))
    except (ConfigError, ListenError) as error:
        _fail(error, 2)
    except ControllerError as error:
        _fail(error, 1)


def _fail(error: Exception, code: int) -> None:
    click.echo(f"eelgrid-controller: {error}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
