"""The agent's settings: parses and checks the flags, and returns one frozen value. Opens no file and no socket."""

import argparse
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from eelgrid_agent.engine.port import SharingStrategy
from eelgrid_agent.engine.users import RunAs
from eelgrid_protos import __version__
from eelgrid_protos.errors import Violation
from eelgrid_protos.messages import TOPOLOGY_PARTS_MOST
from eelgrid_protos.operator_calls import DEFAULT_CONTROLLER, parse_addresses
from eelgrid_protos.quantities import parse_watts
from eelgrid_protos.roles import BadGrant, RoleRules, parse_grants
from eelgrid_protos.sockets import NAMES_MOST
from eelgrid_protos.transport import TlsFiles, TlsFilesIncomplete, collect_tls_files
from eelgrid_protos.values import dataclass

SPOOL_TICKS = 600
# Short enough for prices, which change by the minute at most; long enough that a thousand nodes send 17 a second.
ENERGY_WINDOW_S = 60.0
SPOOL_TICKS_MOST = 86_400
# All nodes of a process together: 5 GPUs a tick are 0.6 kB, so about 90 MB.
SPOOL_TICKS_TOGETHER = 150_000
SPOOL_TICKS_LEAST = 30
# Of --fence-after.
FENCE_S_LEAST = 5.0

# Far beyond any node that is sold, and far under what an overflow could make of it.
POWER_BUDGET_W_MOST = 1_000_000.0
VENDORS = ("auto", "nvidia", "amd")
KUBELET_SOCKET = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
DEVICE_PLUGINS_FOLDER = Path("/var/lib/kubelet/device-plugins")
KUBELET_FOLDER = Path("/var/lib/kubelet")
LEASE_SOCKET = Path("/run/eelgrid/lease.sock")
DEVICE_PLUGIN = ("off", "cdi", "environment")
# A name of DNS; the kubelet takes no other before the slash of a resource.
_DOMAIN = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)+")

_NODE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,251}[A-Za-z0-9])?")
_LABELS_MOST = 64
_LABEL_LENGTH_MOST = 253
_PORT_MOST = 65_535
# A socket of this machine, as gRPC names it; who may connect is up to the permissions of its folder.
_UNIX = re.compile(r"unix:/.+")


class AgentConfigError(ValueError):
    """A flag is wrong (exit code 2); the violation names it and the remedy."""

    def __init__(self, flag: str, problem: str, remedy: str) -> None:
        self.violation = Violation(flag, problem, remedy)
        super().__init__(str(self.violation))


class BadAddress(AgentConfigError):
    """No HOST:PORT."""


class BadLabel(AgentConfigError):
    """No KEY=VALUE."""


class BadNodeName(AgentConfigError):
    """No name that the contract allows."""


class BadTlsFlags(AgentConfigError):
    """Some of the TLS flags without the others."""


class BadRoles(AgentConfigError):
    """A grant that cannot be understood, or roles without TLS."""


class BadLimit(AgentConfigError):
    """A number outside its range."""


class BadEnforcement(AgentConfigError):
    """Flags of enforcement that do not go together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """What the operator asked for."""

    # With commas between those of several controllers.
    controller: str
    listen: str
    metrics: str
    # Probes alone, in a thread of their own; empty for those of the metrics address only.
    probes: str
    metrics_hosts: tuple[str, ...]
    node_name: str
    pool: str
    labels: tuple[tuple[str, str], ...]
    topology: tuple[str, ...]
    model_data_folders: tuple[Path, ...]
    simulate: Path | None
    faults: Path | None
    seed: int
    spool_ticks: int | None
    energy_window_s: float
    vendor: str
    state: Path | None
    observe_only: bool
    ignore_fabric_state: bool
    run_processes: bool
    allow_root: bool
    run_as: RunAs
    job_users: tuple[tuple[str, str], ...]
    gpu_sharing: SharingStrategy
    # 0 for never.
    fence_after_s: float
    power_budget_w: float | None
    web_config: Path | None
    kubelet: Path
    device_plugin: str
    device_plugins_folder: Path
    device_domain: str
    dra: bool
    kubelet_folder: Path
    kubernetes_node: str
    api_server: str
    api_credentials: Path | None
    cdi_folder: Path | None
    slurm_folder: Path | None
    # This node in Slurm, which is out of service while its MIG layout changes; None where it minds no change.
    slurm_node: Path | None
    # Where other engines of the node ask for devices; None for nowhere.
    lease_socket: Path | None
    tls: TlsFiles | None
    roles: RoleRules
    insecure: bool
    log_level: str

    def ticks_most(self, nodes: int) -> int:
        """Ticks that each node may spool."""
        if self.spool_ticks is not None:
            return self.spool_ticks
        return max(SPOOL_TICKS_LEAST, min(SPOOL_TICKS, SPOOL_TICKS_TOGETHER // max(1, nodes)))


def _add_process_flags(add: Callable[..., Any]) -> None:
    add(
        "--run-processes",
        action="store_true",
        help="start the processes of workloads that `eelctl run` submits, as this agent's own user",
    )
    add(
        "--allow-root",
        action="store_true",
        help="with --run-processes as root: run them as root, on a machine that only root uses, such as a container",
    )
    add(
        "--run-as",
        choices=[one.value for one in RunAs],
        help="with --run-processes: owner runs each job as the user who submitted it, which needs root, and refuses what "
        "this agent cannot run so; agent runs every job as this agent's own user (default owner, where the controller "
        "knows who submitted it)",
    )
    add(
        "--map-user",
        dest="job_users",
        action="append",
        type=_job_user,
        default=[],
        metavar="NAME=USER",
        help="with --run-as owner: jobs of the certificate's or local user's name NAME run as USER; repeatable",
    )
    add(
        "--gpu-sharing",
        choices=[one.value for one in SharingStrategy],
        help="with --run-processes: how processes on shares of a GPU share it: in turns, which limits nothing, or by "
        "NVIDIA's Multi-Process Service, side by side and each held to its share of multiprocessors and memory "
        "(default time-slicing)",
    )
    add(
        "--fence-after",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="with --run-processes: stop the jobs of this node when no controller was heard for so long, so that they "
        "may start elsewhere; they have their grace to save a checkpoint (default 0, never)",
    )


def _add_device_plugin_flags(add: Callable[..., Any]) -> None:
    add(
        "--device-plugin",
        choices=DEVICE_PLUGIN,
        default=DEVICE_PLUGIN[0],
        help="offer this node's GPUs and MIG slices to its kubelet, in the stead of NVIDIA's plugin, and give them by "
        "CDI names or by the variable that NVIDIA's runtime reads (default %(default)s)",
    )
    add(
        "--device-plugins-folder",
        type=Path,
        default=DEVICE_PLUGINS_FOLDER,
        metavar="DIR",
        help="where the kubelet registers device plugins (default %(default)s)",
    )
    add(
        "--device-domain",
        default="nvidia.com",
        metavar="DOMAIN",
        help="the domain of the resources that are offered, as in nvidia.com/gpu (default %(default)s)",
    )


def _add_endpoint_flags(add: Callable[..., Any]) -> None:
    add(
        "--controller",
        action="append",
        metavar="HOST:PORT",
        help="the controller; unix:/PATH for a socket; of several, repeated or with commas, the one that leads; or "
        f"ingest processes, of which each node has a first one by its name (default {DEFAULT_CONTROLLER})",
    )
    add("--listen", default="127.0.0.1:7444", metavar="HOST:PORT", help="this node's own API (default %(default)s)")
    add("--metrics", default="127.0.0.1:9465", metavar="HOST:PORT", help="Prometheus metrics (default %(default)s)")
    add("--probes", default="", metavar="HOST:PORT", help="/livez and /readyz alone; none if not given")
    add(
        "--metrics-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name under which the metrics are scraped, beside addresses, localhost and the host's name; may be repeated",
    )


def _add_node_flags(add: Callable[..., Any]) -> None:
    add(
        "--vendor",
        choices=VENDORS,
        default="auto",
        help="the vendor of the GPUs (default: the first whose driver answers)",
    )
    add("--simulate", type=Path, metavar="FILE", help="simulate the nodes of this JSON or TOML file")
    add(
        "--faults",
        type=Path,
        metavar="FILE",
        help="inject the faults that the lines of this file describe into simulated devices",
    )
    add("--seed", type=int, default=1, help="seed of the simulation (default %(default)s)")
    add("--node-name", default="", metavar="NAME", help="this node's name (default: the host's name)")
    add(
        "--pool",
        default="",
        help="the pool of this node, whose enforcement mode applies (default: the pool named default)",
    )
    add("--label", action="append", default=[], metavar="KEY=VALUE", help="a label of this node; may be repeated")
    add(
        "--topology",
        default="",
        metavar="PATH",
        help="the topology of this node, outermost first: zone-a/spine-2/rack-17",
    )
    add(
        "--model-data",
        dest="model_data_folders",
        action="append",
        type=Path,
        default=[],
        metavar="DIR",
        help="tell the controller which model data lie in DIR, such as ~/.cache/huggingface/hub, so that work that loads "
        "them is rather placed here; looked at every 30 s; repeatable",
    )
    add(
        "--energy-window",
        type=float,
        default=ENERGY_WINDOW_S,
        metavar="SECONDS",
        help=f"length of the energy ledger's windows (default {ENERGY_WINDOW_S:g})",
    )
    add(
        "--spool-ticks",
        type=int,
        metavar="N",
        help=f"ticks that a node keeps while it cannot send them (default {SPOOL_TICKS})",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eelgrid-agent",
        description=(
            "Reads this node's GPUs, reports to the controller and enforces the node's plan. It changes a GPU only where "
            "the pool's mode is enforce, or to keep --power-budget, and restores what it changed. The exit code is 0 after "
            "SIGTERM or SIGINT, 2 if a flag, a file or an address cannot be used (an address that is in use among "
            "them), and 1 after any other failure."
        ),
        epilog=(
            "eelgrid-agent mig --help: show and change this node's MIG layouts by hand. "
            "eelgrid-agent energy --help: energy by owner, from a running agent. "
            "eelgrid-agent lease --help: devices that engines of this node hold, take and give back."
        ),
        allow_abbrev=False,
    )
    add = parser.add_argument
    _add_endpoint_flags(add)
    _add_node_flags(add)
    add("--observe-only", action="store_true", help="change no GPU, whatever the pool's mode is")
    add(
        "--ignore-fabric-state",
        action="store_true",
        help="give work to GPUs that are not registered with their NVSwitch fabric: where CUDA works without",
    )
    _add_process_flags(add)
    add("--state", type=Path, metavar="DIR", help="where to record what was changed (default /var/lib/eelgrid as root)")
    add(
        "--power-budget",
        type=_watts,
        metavar="WATTS",
        help="keep the total power of this node's GPUs below this, such as 5600W or 5.6kW, whatever the controller "
        "requests",
    )
    add(
        "--web-config", type=Path, metavar="FILE", help="TLS and passwords of the metrics, as Prometheus exporters have"
    )
    add(
        "--kubelet",
        type=Path,
        default=KUBELET_SOCKET,
        metavar="SOCKET",
        help="the kubelet's pod-resources socket, which lists the devices of pods (default %(default)s)",
    )
    _add_device_plugin_flags(add)
    _add_dra_flags(add)
    _add_slurm_flags(add)
    add(
        "--lease-socket",
        type=Path,
        metavar="PATH",
        help="where `eelgrid-agent lease` asks for devices, for other engines on this node (default "
        f"{LEASE_SOCKET} as root on a real node, else none)",
    )
    add_tls_flags(add)
    _add_role_flags(add)
    add(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="minimum level of log records on standard error; debug has every connection (default %(default)s)",
    )
    # The older name of `--log-level debug`, to be removed in the version after 0.2.
    add("--verbose", dest="log_level", action="store_const", const="debug", help=argparse.SUPPRESS)
    add("--version", action="version", version=f"eelgrid-agent {__version__}")
    return parser


def _add_role_flags(add: Callable[..., Any]) -> None:
    add(
        "--roles",
        choices=("permit", "require"),
        default="permit",
        help="whether a certificate without a role may ask this node's own API, or not (default %(default)s)",
    )
    add(
        "--grant",
        action="append",
        default=[],
        metavar="ROLE=KIND:NAME",
        help="grant a role to certificates of this name, as the controller's --grant does; may be repeated",
    )


def _add_slurm_flags(add: Callable[..., Any]) -> None:
    add(
        "--slurm-folder",
        type=Path,
        metavar="DIR",
        help="the folder in which a Slurm prolog records each job with its devices, and the limit that the job asks for",
    )
    add(
        "--slurm-node",
        type=Path,
        metavar="FILE",
        help="this node as a dynamic node of Slurm: taken out of service there while its MIG layout changes",
    )


def _add_dra_flags(add: Callable[..., Any]) -> None:
    add(
        "--dra",
        choices=("off", "on"),
        default="off",
        help="serve this node's GPUs and MIG slices as a DRA driver (Kubernetes 1.36); not beside --device-plugin "
        "(default %(default)s)",
    )
    add(
        "--kubelet-folder",
        type=Path,
        default=KUBELET_FOLDER,
        metavar="DIR",
        help="with plugins and plugins_registry, by the path that the kubelet sees (default %(default)s)",
    )
    add("--kubernetes-node", default="", metavar="NAME", help="the Node object of this machine (default: --node-name)")
    add("--api-server", default="", metavar="URL", help="Kubernetes' API server (default: from the pod's environment)")
    add(
        "--api-credentials",
        type=Path,
        metavar="DIR",
        help="a folder with token and ca.crt (default: the pod's service account)",
    )
    add(
        "--cdi-folder",
        type=Path,
        metavar="DIR",
        help="the folder for a CDI specification of devices that no other file names, for NVIDIA's container runtime",
    )


def add_tls_flags(add: Callable[..., Any]) -> None:
    """Adds --insecure and the flags of `tls_files`, the same for every program that connects to other machines."""
    add("--tls-certificate", type=Path, metavar="FILE", help="our certificate chain, PEM")
    add("--tls-key", type=Path, metavar="FILE", help="its key, PEM")
    add("--tls-authority", type=Path, metavar="FILE", help="the authority that the other side must come from, PEM")
    add("--insecure", action="store_true", help="talk to other machines without TLS")


def parse_flags(arguments: Sequence[str]) -> AgentConfig:
    """The settings; raises AgentConfigError, and exits by itself for --help and unknown flags, as argparse does."""
    flags = _parser().parse_args(arguments)
    controllers = _controllers(flags.controller)
    checked = [*(("controller", one) for one in controllers), ("listen", flags.listen), ("metrics", flags.metrics)]
    for flag, address in checked:
        if flag == "metrics" or not _UNIX.fullmatch(address):
            check_address(f"--{flag}", address)
    if flags.probes:
        check_address("--probes", flags.probes)
    for flag in ("node_name", "pool"):
        check_node_name(f"--{flag.replace('_', '-')}", getattr(flags, flag))
    if flags.simulate is not None and (flags.node_name or flags.pool or flags.label or flags.topology):
        problem = "is given with --node-name, --pool, --label or --topology"
        raise BadNodeName("--simulate", problem, "say these in the file")
    if flags.simulate is not None and flags.model_data_folders:
        raise BadNodeName("--model-data", "is given with --simulate", "say model_data of each node in the file")
    if not 1.0 <= flags.energy_window <= 3600.0:
        raise BadLimit("--energy-window", f"{flags.energy_window:g} is not in [1, 3600]", "choose seconds inside")
    if flags.spool_ticks is not None and not 1 <= flags.spool_ticks <= SPOOL_TICKS_MOST:
        raise BadLimit("--spool-ticks", f"{flags.spool_ticks} is not in [1, {SPOOL_TICKS_MOST}]", "choose one inside")
    _check_enforcement(flags)
    _check_processes(flags, is_root=os.geteuid() == 0)
    if not _DOMAIN.fullmatch(flags.device_domain):
        raise BadLabel("--device-domain", f"{flags.device_domain!r} is not a domain", "write one such as nvidia.com")
    if flags.device_plugin != "off" and flags.simulate is not None:
        raise BadEnforcement("--device-plugin", "is given with --simulate", "offer real devices only")
    if flags.dra == "on" and flags.simulate is not None:
        raise BadEnforcement("--dra", "is given with --simulate", "serve real devices only")
    if flags.dra == "on" and flags.device_plugin != "off":
        problem = "is given with --device-plugin: one device would be allocated twice"
        raise BadEnforcement("--dra", problem, "choose one of them for this node")
    said = {entry.name: getattr(flags, entry.name) for entry in fields(AgentConfig) if hasattr(flags, entry.name)}
    made = {
        "controller": ",".join(controllers),
        "metrics_hosts": tuple(flags.metrics_host[:NAMES_MOST]),
        "labels": _labels(flags.label),
        "topology": _topology(flags.topology),
        "model_data_folders": tuple(flags.model_data_folders),
        "energy_window_s": flags.energy_window,
        "power_budget_w": flags.power_budget,
        "dra": flags.dra == "on",
        "tls": read_tls_flags(flags),
        "roles": _roles(flags),
        "run_as": RunAs(flags.run_as or RunAs.OWNER.value),
        "job_users": tuple(flags.job_users),
        "fence_after_s": flags.fence_after,
        "gpu_sharing": SharingStrategy(flags.gpu_sharing or SharingStrategy.TIME_SLICING.value),
        "lease_socket": flags.lease_socket or _default_lease_socket(flags),
    }
    return AgentConfig(**{**said, **made})


def _controllers(texts: Sequence[str] | None) -> tuple[str, ...]:
    try:
        return parse_addresses(*(texts or (DEFAULT_CONTROLLER,)))
    except ValueError as error:
        problem, _, remedy = str(error).partition("; ")
        raise BadAddress("--controller", problem, remedy) from None


def _default_lease_socket(flags: argparse.Namespace) -> Path | None:
    return LEASE_SOCKET if flags.simulate is None and os.geteuid() == 0 else None


def _watts(text: str) -> float:
    """Parses watts with their unit, as argparse asks for."""
    try:
        return parse_watts(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _check_enforcement(flags: argparse.Namespace) -> None:
    budget_w = flags.power_budget
    if budget_w is not None and not 0.0 < budget_w <= POWER_BUDGET_W_MOST:
        problem = f"{budget_w:g} is not in (0, {POWER_BUDGET_W_MOST:g}]"
        raise BadLimit("--power-budget", problem, "give the node's watts, for example 5600W")
    if budget_w is not None and flags.observe_only:
        raise BadEnforcement("--power-budget", "cannot be kept with --observe-only", "leave one of them out")
    if flags.faults is not None and flags.simulate is None:
        raise BadEnforcement("--faults", "is given without --simulate", "give it with simulated nodes only")
    if flags.simulate is not None and flags.vendor != "auto":
        raise BadEnforcement("--vendor", "has no meaning with --simulate", "the fleet file defines the GPUs")


def _job_user(text: str) -> tuple[str, str]:
    name, equals, user = text.rpartition("=")
    if not equals or not name or not user:
        raise argparse.ArgumentTypeError(f"{text!r} is no map; write NAME=USER, such as alice@example.org=alice")
    return name, user


def _check_processes(flags: argparse.Namespace, *, is_root: bool) -> None:
    for flag, value in (
        ("--allow-root", flags.allow_root),
        ("--run-as", flags.run_as),
        ("--map-user", flags.job_users),
        ("--gpu-sharing", flags.gpu_sharing),
        ("--fence-after", flags.fence_after),
    ):
        if value and not flags.run_processes:
            raise BadEnforcement(flag, "is given without --run-processes", "leave it out")
    if not flags.run_processes:
        return
    if is_root and not flags.allow_root and flags.run_as != RunAs.OWNER.value:
        problem = "would run everybody's processes as root"
        remedy = "start the agent as the user who owns the work, or with --run-as owner, or --allow-root"
        raise BadEnforcement("--run-processes", problem, remedy)
    if flags.device_plugin != "off" or flags.dra == "on":
        raise BadEnforcement("--run-processes", "is given with --device-plugin or --dra", "let Kubernetes run the work")
    if flags.fence_after and flags.fence_after < FENCE_S_LEAST:
        problem = f"is {flags.fence_after:g} s, and a controller is heard every few seconds at best"
        raise BadEnforcement("--fence-after", problem, f"give {FENCE_S_LEAST:g} or more, such as 300, or 0 for never")
    if flags.simulate is not None and flags.state is None:
        raise BadEnforcement("--run-processes", "is given with --simulate and without --state", "give --state DIR")


def check_address(flag: str, address: str) -> None:
    """Raises BadAddress unless it is HOST:PORT."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isascii() or not port.isdigit() or int(port) > _PORT_MOST:
        raise BadAddress(flag, f"{address!r} is not an address", "write HOST:PORT, for example 127.0.0.1:7443")


def check_node_name(flag: str, name: str) -> None:
    """Raises BadNodeName unless it is empty or a name that the contract allows."""
    if name and not _NODE_NAME.fullmatch(name):
        remedy = "use letters, digits and . _ / -, beginning and ending with a letter or digit"
        raise BadNodeName(flag, f"{name!r} is not a valid name", remedy)


def _topology(path: str) -> tuple[str, ...]:
    parts = tuple(path.split("/")) if path else ()
    if len(parts) > TOPOLOGY_PARTS_MOST or not all(parts):
        problem = f"{path!r} has {len(parts)} parts, or an empty one"
        remedy = f"give up to {TOPOLOGY_PARTS_MOST} names with / between them, outermost first"
        raise BadNodeName("--topology", problem, remedy)
    for part in parts:
        check_node_name("--topology", part)
    return parts


def _labels(pairs: Sequence[str]) -> tuple[tuple[str, str], ...]:
    labels: dict[str, str] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not key or not separator or len(key) > _LABEL_LENGTH_MOST or len(value) > _LABEL_LENGTH_MOST:
            raise BadLabel("--label", f"{pair!r} is not a label", "write KEY=VALUE, each at most 253 characters")
        if key in labels:
            raise BadLabel("--label", f"{key} is given twice", "give each key once")
        labels[key] = value
    if len(labels) > _LABELS_MOST:
        raise BadLabel("--label", f"{len(labels)} labels", f"give at most {_LABELS_MOST}")
    return tuple(labels.items())


def _roles(flags: argparse.Namespace) -> RoleRules:
    """Who may ask this node's own API; raises BadRoles."""
    if flags.tls_authority is None and (flags.roles == "require" or flags.grant):
        raise BadRoles("--roles", "and --grant need --tls-authority", "give it: roles are read of certificates")
    try:
        return RoleRules(demanded=flags.roles == "require", grants=parse_grants(flags.grant))
    except BadGrant as error:
        raise BadRoles("--grant", error.problem.removeprefix("--grant "), error.remedy) from None


def read_tls_flags(flags: argparse.Namespace) -> TlsFiles | None:
    """The three files, or None where none was given; raises BadTlsFlags."""
    try:
        return collect_tls_files(flags.tls_certificate, flags.tls_key, flags.tls_authority)
    except TlsFilesIncomplete:
        remedy = "give --tls-certificate, --tls-key and --tls-authority together"
        raise BadTlsFlags("--tls-*", "mutual TLS needs three files", remedy) from None
