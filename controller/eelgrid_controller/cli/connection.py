"""How every command reaches the controller: shared settings, the options that set them, the channel, and paged listings.

`-o` and `--no-headers` are accepted before and after the command's name, since people type both. grpc and the messages
are imported inside the functions that need them, because they take longer to load than everything else that
`eelctl --help` does. Knows nothing of what is asked.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import click

DEFAULT_CONTROLLER = "127.0.0.1:7443"
OUTPUTS = ("table", "wide", "json", "yaml")

_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class CliSettings:
    """How to reach the controller and how to print."""

    controller: str = DEFAULT_CONTROLLER
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_authority: Path | None = None
    insecure: bool = False
    timeout_s: float = 10.0
    output: str = "table"
    headers: bool = True
    # URL of the live page; empty if not given.
    page: str = ""


def _change(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    if value is not None and parameter.name is not None:
        context.obj = replace(context.obj, **{parameter.name: value})


def output_option(command: _Command) -> _Command:
    """Adds -o and --no-headers to a command that prints an answer."""
    for option in (
        click.option(
            "--no-headers",
            "headers",
            flag_value=False,
            default=None,
            type=bool,
            expose_value=False,
            callback=_change,
            help="Omit the header line.",
        ),
        click.option(
            "-o",
            "--output",
            type=click.Choice(OUTPUTS),
            default=None,
            expose_value=False,
            callback=_change,
            help="Output format.",
        ),
    ):
        command = option(command)
    return command


def tls_files(settings: CliSettings) -> Any:
    """Returns the transport's TlsFiles, None without TLS; raises UsageError unless all three files are given or none."""
    from eelgrid_protos.transport import TlsFiles

    files = (settings.tls_certificate, settings.tls_key, settings.tls_authority)
    if not any(files):
        return None
    certificate, key, authority = files
    if certificate is None or key is None or authority is None:
        raise click.UsageError("--tls-certificate, --tls-key and --tls-authority belong together: give all three")
    return TlsFiles(certificate, key, authority)


@contextmanager
def connect_operators(settings: CliSettings) -> Iterator[Any]:
    """Connects to the operators' API and yields a client of blocking calls; closes the channel on exit."""
    from eelgrid_protos import rpc, transport

    channel = transport.open_blocking_channel(settings.controller, tls=tls_files(settings), insecure=settings.insecure)
    try:
        yield rpc.build_client(rpc.OPERATOR_SERVICE, channel)
    finally:
        channel.close()


def _print_omitted(answer: Any) -> None:
    """Warns on standard error, so that a table or a document on standard output stays intact."""
    if answer.omitted:
        count = f"{answer.omitted} element{'' if answer.omitted == 1 else 's'}"
        click.echo(f"warning: {count} omitted that cannot be shown; see the controller's log for the reason", err=True)


def iterate_pages(
    call: Callable[..., Any], request: Any, items: str, *, timeout_s: float, limit: int | None = None
) -> Iterator[Any]:
    """Yields all items of a paged listing; stops early at `limit`, or at a page that repeats its token."""
    from eelgrid_protos.messages import PAGE_SIZE_MOST

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
    """Fetches all pages and joins their lists into one answer; fields that are not lists are the last page's."""
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
