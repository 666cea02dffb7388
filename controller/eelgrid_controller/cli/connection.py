"""A connection of eelctl to the controller.

Owns opening and closing the channel and walking through pages; must not know
what is asked. grpc is imported here, inside the function, because it takes
longer than everything else that eelctl does.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import click

from eelgrid_controller.cli.settings import CliSettings
from eelgrid_protos.messages import PAGE_SIZE_MOST


def tls_files(settings: CliSettings) -> Any:
    """The transport's TlsFiles, or None; three files or none."""
    from eelgrid_protos.transport import TlsFiles

    files = (settings.tls_certificate, settings.tls_key, settings.tls_authority)
    if not any(files):
        return None
    certificate, key, authority = files
    if certificate is None or key is None or authority is None:
        raise click.UsageError("give --tls-certificate, --tls-key and --tls-authority together")
    return TlsFiles(certificate, key, authority)


@contextmanager
def connect_operators(settings: CliSettings) -> Iterator[Any]:
    """The operators' API as blocking calls, for the length of a `with`."""
    from eelgrid_protos import rpc, transport

    channel = transport.open_blocking_channel(settings.controller, tls=tls_files(settings), insecure=settings.insecure)
    try:
        yield rpc.build_client(rpc.OPERATOR_SERVICE, channel)
    finally:
        channel.close()


def _print_omitted(answer: Any) -> None:
    """On standard error, so that a table or a document stays what it is."""
    if answer.omitted:
        count = f"{answer.omitted} element{'' if answer.omitted == 1 else 's'}"
        click.echo(f"warning: {count} left out that cannot be shown; the controller's log says why", err=True)


def iterate_pages(
    call: Callable[..., Any], request: Any, items: str, *, timeout_s: float, limit: int | None = None
) -> Iterator[Any]:
    """All items of a listing, page by page; ends early at the limit or at a page that repeats its token."""
    left, token = limit, ""
    while left is None or left > 0:
        size = PAGE_SIZE_MOST if left is None else min(left, PAGE_SIZE_MOST)
        answer = call(replace(request, page_size=size, page_token=token), timeout=timeout_s)
        _print_omitted(answer)
        found = getattr(answer, items)[:size]
        yield from found
        left = None if left is None else left - len(found)
        if answer.next_page_token in {"", token}:
            return
        token = answer.next_page_token


def fetch_whole(call: Callable[..., Any], request: Any, *, timeout_s: float) -> Any:
    """A listing of several lists as if it came in one answer; what is no list is the last page's."""
    lists: dict[str, tuple[Any, ...]] = {}
    token = ""
    while True:
        answer = call(replace(request, page_token=token), timeout=timeout_s)
        _print_omitted(answer)
        for entry in fields(answer):
            value = getattr(answer, entry.name)
            if isinstance(value, tuple):
                lists[entry.name] = lists.get(entry.name, ()) + value
        if answer.next_page_token in {"", token}:
            return replace(answer, **lists)
        token = answer.next_page_token
