"""Blocking calls of the operators' API that go on to the controller that leads, for eelctl.

Owns the channels, one for each controller that was called, and the pauses between rounds. Which address is next is
`controller_addresses`' to say. Every call of the service is an attribute, as of `rpc.build_client`; of one address it
behaves as that does, except that it follows whom a follower names. Where stale reads are allowed, those that
`stale_reads` lists go to any controller, and everything else to the one that leads.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from eelgrid_protos import rpc, transport
from eelgrid_protos.controller_addresses import ControllerAddresses, LeaderSearch
from eelgrid_protos.faults import DeadlineExceeded, Fault, Unavailable
from eelgrid_protos.messages import WhoAmIRequest

# Where a call has no limit of its own: longer than a lease of a leader that crashed.
_SEARCH_S = 20.0
# Of several controllers, how long one may take to say whether it leads: a stopped process takes connections and no calls.
_PROBE_S = 2.0


class LeaderClient:
    """Clients of several controllers as one; made by `connect_leader`."""

    def __init__(
        self,
        controllers: ControllerAddresses,
        open_channel: Callable[[str], grpc.Channel],
        *,
        on_staleness: rpc.OnStaleness | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_staleness` allows any controller to answer reads, and is told how stale each answer is."""
        self.controllers = controllers
        # Reads that may be stale have a preference of their own: whoever answered the last one.
        self._readable = ControllerAddresses(controllers.all, may_follow=controllers.may_follow)
        self._on_staleness = on_staleness
        self._open_channel = open_channel
        self._sleep = sleep
        self._clock = clock
        self._channels: dict[str, grpc.Channel] = {}
        self._clients: dict[str, Any] = {}
        self._found: set[ControllerAddresses] = set()
        self._client_at(controllers.preferred)
        for method in rpc.OPERATOR_SERVICE.methods:
            if method.request_streaming:
                call = self._two_way(method)
            elif method.response_streaming:
                call = self._stream(method)
            else:
                call = self._unary(method)
            setattr(self, method.attribute, call)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # For type checkers: every call is set above.
        raise AttributeError(name)

    def build_client(self, service: rpc.RpcService) -> Any:
        """Returns a client of another service of the controller that leads; raises Fault if none is found."""
        self._find_first(None)
        self._client_at(self.controllers.preferred)
        return rpc.build_client(service, self._channels[self.controllers.preferred])

    def close(self) -> None:
        """Ends all calls and closes the channels."""
        transport.close_channels(self._channels.values())

    def _client_at(self, address: str) -> Any:
        if address not in self._clients:
            self._channels[address] = self._open_channel(address)
            self._clients[address] = rpc.build_client(rpc.OPERATOR_SERVICE, self._channels[address])
        return self._clients[address]

    def _go_on(self, search: LeaderSearch, fault: Fault, deadline_s: float) -> None:
        """Waits until the next address may be tried; raises the fault of the call if none may."""
        pause_s = search.after_call(fault)
        if pause_s is None or self._clock() + pause_s >= deadline_s:
            raise search.describe_failure(fault) from None
        self._sleep(pause_s)

    def _unary(self, method: rpc.RpcMethod) -> Callable[..., Any]:
        is_stale = self._on_staleness is not None and method.may_be_stale
        controllers = self._readable if is_stale else self.controllers
        options = {"on_staleness": self._on_staleness} if is_stale else {}

        def call(request: object, timeout: float | None = None) -> Any:
            self._find_first(timeout, controllers)
            search, deadline_s = controllers.begin_search(), self._clock() + (timeout or _SEARCH_S)
            while True:
                left_s = None if timeout is None else max(0.001, deadline_s - self._clock())
                client = self._client_at(search.address)
                try:
                    answer = getattr(client, method.attribute)(request, timeout=left_s, **options)
                except Fault as fault:
                    self._go_on(search, fault, deadline_s)
                else:
                    search.succeed()
                    return answer

        return call

    def _stream(self, method: rpc.RpcMethod) -> Callable[..., Iterator[Any]]:
        def call(request: object, timeout: float | None = None) -> Iterator[Any]:
            self._find_first(timeout)
            search, deadline_s = self.controllers.begin_search(), self._clock() + (timeout or _SEARCH_S)
            while True:
                answers = getattr(self._client_at(search.address), method.attribute)(request, timeout=timeout)
                has_begun = False
                try:
                    for answer in answers:
                        has_begun = True
                        yield answer
                except Fault as fault:
                    if has_begun:
                        raise
                    self._go_on(search, fault, deadline_s)
                else:
                    search.succeed()
                    return
                finally:
                    answers.close()

        return call

    def _two_way(self, method: rpc.RpcMethod) -> Callable[..., Iterator[Any]]:
        def call(requests: Any, timeout: float | None = None) -> Iterator[Any]:
            # What a stream has taken of its requests cannot be taken again, so the leader is found first.
            self._find_first(timeout)
            client = self._client_at(self.controllers.preferred)
            answers: Iterator[Any] = getattr(client, method.attribute)(requests, timeout=timeout)
            return answers

        return call

    def _find_first(self, timeout_s: float | None, controllers: ControllerAddresses | None = None) -> None:
        """Before the first call: that one may not be repeated, so it had better not go to a process that hangs."""
        controllers = controllers or self.controllers
        if len(controllers.all) > 1 and controllers not in self._found:
            self._find(controllers, timeout_s or _SEARCH_S)

    def find_leader(self, timeout_s: float) -> str:
        """Returns the address of the controller that leads; raises Fault. Asks for nothing that changes anything."""
        return self._find(self.controllers, timeout_s)

    def _find(self, controllers: ControllerAddresses, timeout_s: float) -> str:
        """Returns the address of the first that answers: of those that may follow, or lead. Raises Fault."""
        options = {"on_staleness": _ignore_staleness} if controllers is self._readable else {}
        search, deadline_s = controllers.begin_search(), self._clock() + timeout_s
        while True:
            left_s = max(0.001, deadline_s - self._clock())
            try:
                client = self._client_at(search.address)
                limit_s = min(left_s, _PROBE_S) if search.is_choice else left_s
                client.who_am_i(WhoAmIRequest(), timeout=limit_s, **options)
            except (Unavailable, DeadlineExceeded) as fault:
                pause_s = search.move_on(fault.message.rpartition(": ")[2], getattr(fault, "leader", ""))
                if pause_s is None or self._clock() + pause_s >= deadline_s:
                    raise search.describe_failure(fault) from None
                self._sleep(pause_s)
            else:
                search.succeed()
                self._found.add(controllers)
                return search.address


def _ignore_staleness(_: object) -> None:
    """Only whether somebody answers is asked."""


def connect_leader(
    addresses: tuple[str, ...],
    *,
    tls: "transport.TlsContents | None",
    insecure: bool = False,
    on_staleness: rpc.OnStaleness | None = None,
) -> LeaderClient:
    """Opens a client of the controllers at these addresses, as `LeaderClient` says.

    Raises ListenError if a connection would be unprotected.
    """
    for address in addresses:
        transport.check_target(address, tls, insecure=insecure)

    def may_follow(address: str) -> bool:
        return transport.may_connect(address, tls=tls, insecure=insecure)

    def open_channel(address: str) -> grpc.Channel:
        return transport.open_blocking_channel(address, tls=tls, insecure=insecure, is_choice=len(addresses) > 1)

    return LeaderClient(ControllerAddresses(addresses, may_follow=may_follow), open_channel, on_staleness=on_staleness)
