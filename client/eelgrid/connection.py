"""Connection: the client's settings, its channel, and the rules by which a failed attempt is repeated.

The rules do no I/O: `CallAttempts` and `WatchAttempts` say after each failure how long to pause, or raise the error that
ends the call. Both clients share them, and differ only in how they wait. Knows no call by name.

Calls that only read, and submissions under a fixed id, are repeated after UnavailableError, within the time limit of the
call; pauses double up to a limit, and each is shortened at random by up to a half, so that the clients of a controller
that restarts do not return all at once. Other calls are made once, because nobody can tell whether the lost one was
carried out.

Of several addresses, a call goes on to the next where nothing can have been done, whatever it is: a follower refused it,
or nobody took the connection; see `eelgrid_protos.controller_addresses`.
"""

import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import grpc
import grpc.aio

from eelgrid.errors import (
    EelgridError,
    InvalidSettingsError,
    error_from_contract,
    error_from_fault,
    error_from_settings,
)
from eelgrid_protos import faults, rpc, transport
from eelgrid_protos.controller_addresses import ControllerAddresses, LeaderSearch
from eelgrid_protos.errors import ContractError
from eelgrid_protos.messages import Workload
from eelgrid_protos.operator_calls import CONTROLLER_VARIABLE, DEFAULT_CONTROLLER, TLS_VARIABLES, parse_addresses

# A stream that lasted this long had reached the controller: gRPC gives up connecting after 20 s.
_CONNECTED_AFTER_S = 30.0
# The call for each type of request.
CALL_NAMES: Mapping[type, str] = {method.request: method.attribute for method in rpc.OPERATOR_SERVICE.methods}
# Those that a follower answers, if the caller allows it.
STALE_CALLS = frozenset(method.attribute for method in rpc.OPERATOR_SERVICE.methods if method.may_be_stale)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """How often a read is tried, with which pauses, and for how long a watch tries to reconnect."""

    attempts: int = 5
    pause_first_s: float = 0.1
    pause_longest_s: float = 5.0
    reconnect_s: float = 300.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or not 0.0 < self.pause_first_s <= self.pause_longest_s or self.reconnect_s < 0.0:
            raise InvalidSettingsError(
                f"{self} cannot be used", "give attempts >= 1 and 0 < pause_first_s <= pause_longest_s"
            )

    def pause_s(self, failures: int, jitter: Callable[[], float] = random.random) -> float:
        """Returns the pause after so many failures in a row."""
        longest_s = min(self.pause_longest_s, self.pause_first_s * 2.0 ** min(failures - 1, 30))
        return longest_s * (1.0 - 0.5 * jitter())


DEFAULT_RETRIES = Retries()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    """Where the controller is, how the connection is secured, and the time limit of a call."""

    address: str
    tls: transport.TlsContents | None
    insecure: bool
    timeout_s: float
    retries: Retries
    # Those of `address`, and which of them led last.
    controllers: ControllerAddresses = field(init=False, compare=False)

    def __post_init__(self) -> None:
        may_follow = partial(transport.may_connect, tls=self.tls, insecure=self.insecure)
        found = ControllerAddresses(parse_addresses(self.address), may_follow=may_follow)
        object.__setattr__(self, "controllers", found)

    @classmethod
    def resolve(
        cls,
        *,
        address: str | Iterable[str] | None,
        tls: transport.TlsFiles | None,
        insecure: bool,
        timeout_s: float,
        retries: Retries,
        environment: Mapping[str, str] = os.environ,
    ) -> Self:
        """Completes the settings from the environment, as eelctl does; raises InvalidSettingsError."""
        named = (address,) if isinstance(address, str) else tuple(address or ())
        target = ",".join(named) or environment.get(CONTROLLER_VARIABLE) or DEFAULT_CONTROLLER
        if not timeout_s > 0.0:
            raise InvalidSettingsError(f"timeout_s is {timeout_s}", "give a number of seconds above 0")
        try:
            files = tls or _tls_from_environment(environment)
            for one in parse_addresses(target):
                transport.check_target(one, files, insecure=insecure)
            contents = files.read_contents() if files else None
        except transport.ListenError as error:
            raise error_from_settings(error, target) from None
        except ValueError as error:
            problem, _, remedy = str(error).partition("; ")
            raise InvalidSettingsError(f"address {problem}", remedy) from None
        return cls(address=target, tls=contents, insecure=insecure, timeout_s=timeout_s, retries=retries)


def _tls_from_environment(environment: Mapping[str, str]) -> transport.TlsFiles | None:
    names = [environment.get(name) for name in TLS_VARIABLES]
    certificate, key, authority = (Path(name) if name else None for name in names)
    try:
        return transport.collect_tls_files(certificate, key, authority)
    except transport.TlsFilesIncomplete:
        raise InvalidSettingsError(
            f"only some of {', '.join(TLS_VARIABLES)} are set", "set all three, or none"
        ) from None


class BlockingConnection:
    """A channel to each controller that was called, for programs without an event loop; for any thread."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self._settings = settings
        self._channels: dict[str, grpc.Channel] = {}
        self._calls: dict[str, Any] = {}
        self._opening = threading.Lock()
        self.calls_at(settings.controllers.preferred)

    def calls_at(self, address: str) -> Any:
        """The calls of the service at a controller."""
        settings = self._settings
        with self._opening:
            if address not in self._calls:
                self._channels[address] = transport.open_blocking_channel(
                    address, tls=settings.tls, insecure=settings.insecure, is_choice=len(settings.controllers.all) > 1
                )
                self._calls[address] = rpc.build_client(rpc.OPERATOR_SERVICE, self._channels[address])
            return self._calls[address]

    def close(self) -> None:
        """Ends all calls and closes the channels."""
        transport.close_channels(self._channels.values())


class AsyncConnection:
    """A channel to each controller for asyncio, opened by the first call, in the event loop of that call."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self._settings = settings
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._calls: dict[str, Any] = {}

    def calls_at(self, address: str) -> Any:
        """The calls of the service at a controller."""
        if address not in self._calls:
            settings = self._settings
            self._channels[address] = transport.open_channel(
                address, tls=settings.tls, insecure=settings.insecure, is_choice=len(settings.controllers.all) > 1
            )
            self._calls[address] = rpc.build_client(rpc.OPERATOR_SERVICE, self._channels[address])
        return self._calls[address]

    async def close(self) -> None:
        """Ends all calls and closes the channels."""
        for channel in self._channels.values():
            await channel.close()


class CallAttempts:
    """The attempts of one call, which together stay within one time limit."""

    def __init__(
        self,
        settings: ConnectionSettings,
        timeout_s: float,
        *,
        is_repeatable: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._timeout_s = timeout_s
        self._attempts = settings.retries.attempts if is_repeatable else 1
        self._clock = clock
        self._deadline_s = clock() + timeout_s
        self._failures = 0
        # Where to make the next attempt, and to say that it succeeded.
        self.search: LeaderSearch = settings.controllers.begin_search()

    def left_s(self) -> float:
        """Returns the time limit of the next attempt."""
        return max(self._deadline_s - self._clock(), 0.001)

    def pause_after(self, error: faults.Fault | ContractError) -> float:
        """Returns how long to pause before the next attempt; raises EelgridError if there is none."""
        moved_s = self.search.after_call(error)
        if moved_s is not None and self._clock() + moved_s < self._deadline_s:
            return moved_s
        if isinstance(error, faults.Fault):
            error = self.search.describe_failure(error)
        self._failures += 1
        if isinstance(error, faults.Unavailable) and self._failures < self._attempts:
            pause_s = self._settings.retries.pause_s(self._failures)
            if self._clock() + pause_s < self._deadline_s:
                return pause_s
        raise convert_error(error, self._settings, self._timeout_s) from None


class WatchAttempts:
    """The connections of one watch: the first is tried like a read, a lost one for `Retries.reconnect_s`."""

    def __init__(self, settings: ConnectionSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self.search: LeaderSearch = settings.controllers.begin_search()
        self._was_connected = False
        self._failures = 0
        self._lost_s = self._begun_s = clock()

    def begin(self) -> None:
        """Notes that an attempt begins."""
        self._begun_s = self._clock()

    def mark_connected(self) -> None:
        """Notes that the controller sent something."""
        if self._failures or not self._was_connected:
            self.search.succeed()
        self._was_connected = True
        self._failures = 0

    def pause_after(self, error: faults.Fault | ContractError) -> float:
        """Returns how long to pause before the next attempt; raises EelgridError if there is none.

        AbortedError means that the controller no longer has the changes in between: a new call begins with the present state.
        """
        now_s = self._clock()
        if now_s - self._begun_s >= _CONNECTED_AFTER_S:
            self.mark_connected()
        if self._failures == 0:
            self._lost_s = now_s
        self._failures += 1
        # A watch changes nothing, so any other controller may be asked.
        if isinstance(error, faults.Unavailable) and (self.search.is_choice or isinstance(error, faults.NotLeader)):
            self.search.move_on(error.message, getattr(error, "leader", ""))
            error = self.search.describe_failure(error)
        if isinstance(error, faults.Unavailable | faults.Aborted):
            pause_s = self._settings.retries.pause_s(self._failures)
            if self._was_connected:
                may_repeat = now_s + pause_s - self._lost_s <= self._settings.retries.reconnect_s
            else:
                may_repeat = self._failures < self._settings.retries.attempts
            if may_repeat:
                return pause_s
        raise convert_error(error, self._settings, self._settings.timeout_s) from None


class WatchPosition:
    """How far a watch of workloads has come, so that a new connection repeats nothing and misses nothing.

    Several workloads may change in one revision, and the connection may be lost between them: a new call asks for that
    revision again, and those that were delivered are left out.
    """

    def __init__(self, after_revision: int) -> None:
        self._after = after_revision
        self._newest = after_revision
        self._delivered: set[str] = set()

    @property
    def resume_revision(self) -> int:
        """The revision after which a new call must begin."""
        return self._after

    def accept(self, workload: Workload) -> bool:
        """Returns whether the change is to be delivered, and notes that it is."""
        if workload.revision < self._newest or (
            workload.revision == self._newest and workload.workload_id in self._delivered
        ):
            return False
        if workload.revision > self._newest:
            self._newest = workload.revision
            self._after = max(self._after, workload.revision - 1)
            self._delivered.clear()
        self._delivered.add(workload.workload_id)
        return True


def convert_error(error: faults.Fault | ContractError, settings: ConnectionSettings, timeout_s: float) -> EelgridError:
    """Returns the error of this package for a failed call."""
    if isinstance(error, ContractError):
        return error_from_contract(error)
    return error_from_fault(error, address=settings.address, timeout_s=timeout_s)
