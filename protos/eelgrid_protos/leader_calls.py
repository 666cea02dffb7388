"""Blocking calls of the operators' API that go on to the controller that leads, for eelctl.

Owns the channels, one for each controller that was called, and the pauses between rounds. Which address is next is
`controller_addresses`' to say. Every call of the service is an attribute, as of `rpc.build_client`; of one address it
behaves as that does, except that it follows whom a follower names.
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
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.controllers = controllers
        self._open_channel = open_channel
        self._sleep = sleep
        self._clock = clock
        self._channels: dict[str, grpc.Channel] = {}
        self._clients: dict[str, Any] = {}
        self._is_found = False
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
        for channel in self._channels.values():
            channel.close()

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
        def call(request: object, timeout: float | None = None) -> Any:
            self._find_first(timeout)
            search, deadline_s = self.controllers.begin_search(), self._clock() + (timeout or _SEARCH_S)
            while True:
                left_s = None if timeout is None else max(0.001, deadline_s - self._clock())
                try:
                    answer = getattr(self._client_at(search.address), method.attribute)(request, timeout=left_s)
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

    def _find_first(self, timeout_s: float | None) -> None:
        """Before the first call: that one may not be repeated, so it had better not go to a process that hangs."""
        if len(self.controllers.all) > 1 and not self._is_found:
            self.find_leader(timeout_s or _SEARCH_S)

    def find_leader(self, timeout_s: float) -> str:
        """Returns the address of the controller that leads; raises Fault. Asks for nothing that changes anything."""
        search, deadline_s = self.controllers.begin_search(), self._clock() + timeout_s
        while True:
            left_s = max(0.001, deadline_s - self._clock())
            try:
                client = self._client_at(search.address)
                client.who_am_i(WhoAmIRequest(), timeout=min(left_s, _PROBE_S) if search.is_choice else left_s)
            except (Unavailable, DeadlineExceeded) as fault:
                pause_s = search.move_on(fault.message.rpartition(": ")[2], getattr(fault, "leader", ""))
                if pause_s is None or self._clock() + pause_s >= deadline_s:
                    raise search.describe_failure(fault) from None
                self._sleep(pause_s)
            else:
                search.succeed()
                self._is_found = True
                return search.address


def connect_leader(
    addresses: tuple[str, ...], *, tls: "transport.TlsContents | None", insecure: bool = False
) -> LeaderClient:
    """Opens a client of the controllers at these addresses; raises ListenError if a connection would be unprotected."""
    for address in addresses:
        transport.check_target(address, tls, insecure=insecure)

    def may_follow(address: str) -> bool:
        return transport.may_connect(address, tls=tls, insecure=insecure)

    def open_channel(address: str) -> grpc.Channel:
        return transport.open_blocking_channel(address, tls=tls, insecure=insecure, is_choice=len(addresses) > 1)

    return LeaderClient(ControllerAddresses(addresses, may_follow=may_follow), open_channel)
