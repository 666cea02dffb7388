"""Power of whole nodes: the port to a node's BMC, its adapters (IPMI, Redfish, Wake-on-LAN, a site's commands), and their file.

Owns how each kind of BMC is asked, bounds and retries, and the file that says which node has which. Must not know an engine,
nor why a node is to sleep.

Theory. Every order is for a state and not for an edge: who asks twice, or after a crash, gets the same. Off is asked of the
operating system (IPMI `soft`, Redfish `GracefulShutdown`), never forced: a node that does not go down stays up and is
reported. Secrets are in files that only their owner reads, and reach ipmitool by its environment and Redfish by TLS; neither
is on a command line. A BMC that does not answer costs one bounded time for each try, and no other node anything.

Sources: IPMI 2.0 section 28 (Chassis Control), ipmitool(1); DMTF DSP0266 and DSP0268 (ComputerSystem.Reset, PowerState);
AMD's Magic Packet Technology (publication 20213).
"""

import base64
import contextlib
import http.client
import ipaddress
import json
import os
import re
import socket
import ssl
import stat
import subprocess
import tomllib
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

_ANSWER_BYTES_MOST = 2**20
_NODES_MOST = 65_536
_FILE_BYTES_MOST = 16 * 2**20
_SECRET_BYTES_MOST = 1024
_WAKE_PORT = 9
_MAC = re.compile(r"(?:[0-9a-fA-F]{2}[:-]){5}[0-9a-fA-F]{2}")


class BmcError(Exception):
    """A BMC did not do what was asked, or not in time; the message says which and what to look at."""


class BmcFileError(ValueError):
    """The file of BMCs cannot be used; the message names the file, the field and the remedy."""


class Bmc(Protocol):
    """One node's power. Every call may block for a bounded time, and raises BmcError."""

    def read_power(self) -> bool | None:
        """Returns whether the node has power; None where that cannot be asked."""

    def power_on(self) -> None:
        """Has the node start."""

    def power_off(self) -> None:
        """Has the node shut down."""


def _run(command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None) -> str:
    try:
        done = subprocess.run(  # noqa: S603  # the commands are the operator's
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
        )
    except subprocess.TimeoutExpired:
        raise BmcError(f"{command[0]} did not end in {timeout_s:g} s; look whether the BMC answers") from None
    except OSError as error:
        raise BmcError(f"{command[0]} cannot be run: {error.strerror}; install it here") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise BmcError(f"{command[0]}: {said[-1][:200] if said else f'ended with {done.returncode}'}")
    return done.stdout[:_ANSWER_BYTES_MOST]


@dataclass(frozen=True, slots=True, kw_only=True)
class IpmiBmc:
    """A BMC asked by ipmitool over the network (lanplus)."""

    address: str
    user: str
    password: str = field(repr=False)
    timeout_s: float = 10.0

    def read_power(self) -> bool:
        """Returns whether the node has power."""
        said = self._ask("status")
        if "is on" in said or "is off" in said:
            return "is on" in said
        raise BmcError(f"ipmitool at {self.address} says {said[:80]!r}, which is no state of power")

    def power_on(self) -> None:
        """Has the node start."""
        self._ask("on")

    def power_off(self) -> None:
        """Has the operating system shut down (ACPI)."""
        self._ask("soft")

    def _ask(self, order: str) -> str:
        # -E reads the password from the environment; -N and -R are ipmitool's own patience.
        command = (
            "ipmitool", "-I", "lanplus", "-H", self.address, "-U", self.user, "-E", "-N", "2", "-R", "2",
            "chassis", "power", order,
        )  # fmt: skip
        return _run(command, self.timeout_s, {"IPMI_PASSWORD": self.password, "LC_ALL": "C"})


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A BMC that sends its callers elsewhere would get them to show the password there."""

    def redirect_request(self, *arguments: Any, **more: Any) -> None:
        del arguments, more


@dataclass(frozen=True, slots=True, kw_only=True)
class RedfishBmc:
    """A BMC asked by Redfish; `system` is the path of its ComputerSystem, found if empty."""

    address: str
    user: str
    password: str = field(repr=False)
    system: str = ""
    authority: Path | None = None
    timeout_s: float = 10.0

    def read_power(self) -> bool:
        """Returns whether the node has power, or gets it."""
        state = self._ask(self._find_system()).get("PowerState")
        if state not in ("On", "Off", "PoweringOn", "PoweringOff", "Paused"):
            raise BmcError(f"Redfish at {self.address} says PowerState {str(state)[:40]!r}, which is no state of power")
        return state in ("On", "PoweringOn", "Paused")

    def power_on(self) -> None:
        """Has the node start."""
        self._reset("On")

    def power_off(self) -> None:
        """Has the operating system shut down."""
        self._reset("GracefulShutdown")

    def _reset(self, kind: str) -> None:
        self._ask(f"{self._find_system()}/Actions/ComputerSystem.Reset", {"ResetType": kind})

    def _find_system(self) -> str:
        if self.system:
            return self.system.rstrip("/")
        members = self._ask("/redfish/v1/Systems").get("Members")
        found = (
            members[0].get("@odata.id") if isinstance(members, list) and members and isinstance(members[0], dict) else 0
        )
        if not isinstance(found, str) or not re.fullmatch(r"/redfish/v1/[\w./-]{1,200}", found):
            raise BmcError(f"Redfish at {self.address} names no system; give its path as system")
        return found.rstrip("/")

    def _ask(self, path: str, body: Mapping[str, str] | None = None) -> dict[str, Any]:
        token = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
        request = urllib.request.Request(  # noqa: S310  # the scheme is checked when the file is read
            self.address.rstrip("/") + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": f"Basic {token}",
                "Content-Type": "application/json",
                "Accept": "application/json",
            },
        )
        trust = ssl.create_default_context(cafile=None if self.authority is None else str(self.authority))
        # A proxy of the environment has no business between us and a BMC.
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trust), _NoRedirect
        )
        try:
            with opener.open(request, timeout=self.timeout_s) as answer:
                content = answer.read(_ANSWER_BYTES_MOST + 1)
        except urllib.error.HTTPError as error:
            error.close()
            raise BmcError(f"Redfish at {self.address} answers {error.code} to {path}") from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise BmcError(f"Redfish at {self.address}: {str(reason)[:200]}") from None
        if len(content) > _ANSWER_BYTES_MOST:
            raise BmcError(f"Redfish at {self.address} answers {path} with more than {_ANSWER_BYTES_MOST} bytes")
        try:
            found = json.loads(content) if content.strip() else {}
        except ValueError:
            raise BmcError(f"Redfish at {self.address} answers {path} with what is no JSON") from None
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeOnLan:
    """A node without a BMC: a magic packet wakes it, and a command of the site puts it to sleep."""

    mac: str
    off: tuple[str, ...]
    broadcast: str = "255.255.255.255"
    port: int = _WAKE_PORT
    timeout_s: float = 10.0

    def read_power(self) -> None:
        """Nobody is there to be asked."""

    def power_on(self) -> None:
        """Sends the magic packet, three times, since nothing acknowledges it."""
        packet = b"\xff" * 6 + bytes.fromhex(re.sub("[:-]", "", self.mac)) * 16
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                sender.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
                for _ in range(3):
                    sender.sendto(packet, (self.broadcast, self.port))
        except OSError as error:
            raise BmcError(
                f"magic packet to {self.broadcast}: {error.strerror}; set broadcast to the nodes' network"
            ) from None

    def power_off(self) -> None:
        """Runs the site's command."""
        _run(self.off, self.timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandBmc:
    """Commands of the site, for whatever else there is: a PDU, a cloud, a test."""

    on: tuple[str, ...]
    off: tuple[str, ...]
    timeout_s: float = 10.0

    def read_power(self) -> None:
        """Is left to the commands."""

    def power_on(self) -> None:
        """Runs the site's command."""
        _run(self.on, self.timeout_s)

    def power_off(self) -> None:
        """Runs the site's command."""
        _run(self.off, self.timeout_s)


# The file

_FIELDS = {
    "ipmi": frozenset({"address", "user", "password_file"}),
    "redfish": frozenset({"address", "user", "password_file", "system", "authority"}),
    "wake-on-lan": frozenset({"mac", "off", "broadcast", "port"}),
    "command": frozenset({"on", "off"}),
}


def load_bmcs(path: Path) -> dict[str, Bmc]:
    """Reads the BMC of each node; raises BmcFileError, also where others may read a secret or write the file.

    [defaults]                       # for every node
    kind = "redfish"                 # or ipmi, wake-on-lan, command
    user = "eelgrid"
    password_file = "/etc/eelgrid/bmc-password"

    [nodes.n1]
    address = "https://n1-bmc"
    [nodes.n2]
    kind = "wake-on-lan"
    mac = "aa:bb:cc:dd:ee:ff"
    off = ["ssh", "n2", "systemctl", "suspend"]
    """
    content = _read_trusted(path, _FILE_BYTES_MOST, secret=False)
    try:
        document = tomllib.loads(content)
    except tomllib.TOMLDecodeError as error:
        raise BmcFileError(f"{path}: is no TOML ({error}); correct it") from None
    nodes, defaults = document.get("nodes"), document.get("defaults", {})
    if not isinstance(nodes, dict) or not isinstance(defaults, dict) or len(nodes) > _NODES_MOST:
        raise BmcFileError(f"{path}: nodes: must be tables [nodes.NAME], {_NODES_MOST} at the most; see the guide")
    found = {}
    for name, own in nodes.items():
        try:
            found[name] = _build({**defaults, **own} if isinstance(own, dict) else {})
        except BmcFileError as error:
            raise BmcFileError(f"{path}: nodes.{name}: {error}") from None
    return found


def _build(fields: dict[str, Any]) -> Bmc:
    kind = fields.get("kind")
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise BmcFileError(f"kind: {str(kind)[:40]!r} is not one of {', '.join(_FIELDS)}; choose one")
    # Defaults may be of another kind's; what no kind knows is a slip.
    strange = fields.keys() - set().union(*_FIELDS.values()) - {"kind", "timeout_s"}
    if strange:
        raise BmcFileError(f"{min(strange)}: is no field; correct the spelling or remove it")
    timeout_s = fields.get("timeout_s", 10.0)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0.1 <= timeout_s <= 300.0:
        raise BmcFileError("timeout_s: must be in [0.1, 300]; choose seconds inside")
    if kind == "command":
        return CommandBmc(on=_command(fields, "on"), off=_command(fields, "off"), timeout_s=timeout_s)
    if kind == "wake-on-lan":
        mac, port = _text(fields, "mac"), fields.get("port", _WAKE_PORT)
        if not _MAC.fullmatch(mac):
            raise BmcFileError(
                f"mac: {mac[:40]!r} is no address of a network card; write one such as aa:bb:cc:dd:ee:ff"
            )
        if not isinstance(port, int) or not 0 < port < 65_536:
            raise BmcFileError("port: must be in [1, 65535]; 9 is usual")
        broadcast = str(fields.get("broadcast", "255.255.255.255"))
        return WakeOnLan(mac=mac, off=_command(fields, "off"), broadcast=broadcast, port=port, timeout_s=timeout_s)
    address, user = _text(fields, "address"), _text(fields, "user")
    password = _read_trusted(Path(_text(fields, "password_file")), _SECRET_BYTES_MOST, secret=True).strip()
    if kind == "ipmi":
        if not re.fullmatch(r"[A-Za-z0-9.:-]{1,253}", address) or address.startswith("-"):
            raise BmcFileError(f"address: {address[:40]!r} is no host; write its name or address")
        return IpmiBmc(address=address, user=user, password=password, timeout_s=timeout_s)
    _check_url(address)
    authority = fields.get("authority")
    return RedfishBmc(
        address=address,
        user=user,
        password=password,
        system=str(fields.get("system", "")),
        authority=None if authority is None else Path(str(authority)),
        timeout_s=timeout_s,
    )


def _check_url(address: str) -> None:
    try:
        parts = urllib.parse.urlsplit(address)
        _ = parts.port
    except ValueError:
        raise BmcFileError(f"address: {address[:80]!r} is no URL; write https://HOST[:PORT]") from None
    is_local = parts.hostname == "localhost"
    with contextlib.suppress(ValueError):
        is_local = is_local or ipaddress.ip_address(parts.hostname or "").is_loopback
    if parts.scheme != "https" and not (parts.scheme == "http" and is_local):
        raise BmcFileError(f"address: {address[:80]!r} must begin with https://; a password is sent")
    if not parts.hostname or parts.username or parts.query or parts.path not in ("", "/"):
        raise BmcFileError(f"address: {address[:80]!r} must be https://HOST[:PORT]; give a path as system")


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise BmcFileError(f"{name}: is missing; give it here or in [defaults]")
    return value


def _command(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = fields.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(part, str) for part in value):
        raise BmcFileError(f'{name}: must be a command as a list, such as ["ssh", "n1", "poweroff"]')
    return tuple(value)


def _read_trusted(path: Path, most: int, *, secret: bool) -> str:
    """Reads a file that others cannot have written, nor read if it is a secret."""
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            content = file.read(most + 1)
    except OSError as error:
        raise BmcFileError(f"{path}: cannot be read ({error.strerror}); make it readable for this user") from None
    if about.st_uid not in (0, os.geteuid()) or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BmcFileError(f"{path}: others may write it; make it its owner's alone (chmod go-w)")
    if secret and about.st_mode & stat.S_IROTH:
        raise BmcFileError(f"{path}: everybody may read it; make it secret (chmod 600)")
    if len(content) > most:
        raise BmcFileError(f"{path}: has more than {most} bytes; give a shorter one")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise BmcFileError(f"{path}: is no text; correct it") from None
