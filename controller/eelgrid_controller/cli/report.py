"""eelctl report: a month's energy as one page of HTML, and as PDF where a Chromium is at hand.

Owns what is asked and the files. Must not know how the page looks.
"""

import shutil
import subprocess
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import click

from eelgrid_controller.cli.connection import operators
from eelgrid_controller.cli.energy import document_of, stretch_ns
from eelgrid_controller.cli.report_page import Section, page_of
from eelgrid_controller.cli.settings import Settings, printing
from eelgrid_protos.messages import EnergyGrouping, QueryEnergyReportRequest

__all__ = ["DAYS", "SECTIONS", "report"]

_CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_PDF_S = 120.0
SECTIONS = (
    ("Namespaces", ("namespace",), 40),
    ("Workloads", ("title", "namespace"), 60),
    ("Queues", ("queue",), 20),
    ("GPU models and pools", ("gpu_model", "pool"), 20),
)
DAYS = (("day",), 40)


@click.command()
@click.option("--month", metavar="YYYY-MM", help="A calendar month (UTC); by default the one that ended last.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The page of HTML.")
@click.option("--pdf", type=click.Path(path_type=Path, dir_okay=False), help="The same as PDF, printed by Chromium.")
@printing
@click.pass_obj
def report(settings: Settings, *, month: str | None, out: Path, pdf: Path | None) -> None:
    """Write a month's energy, cost and carbon as a page that can be read, sent and printed.

    The page needs nothing else: no network and no scripts. Numbers are those of eelctl energy.
    """
    browser = _chromium() if pdf is not None else ""
    month = month or _last_month(time.time())
    begin_ns, end_ns = stretch_ns(0, month, now_ns=0)
    request = QueryEnergyReportRequest(
        begin_ns=begin_ns, end_ns=end_ns,
        groupings=tuple(
            EnergyGrouping(group_by=by, rows_most=rows) for by, rows in (*((by, rows) for _, by, rows in SECTIONS), DAYS)
        ),
    )  # fmt: skip
    with operators(settings) as client:
        *answers, of_days = client.query_energy_report(request, timeout=settings.timeout_s).answers
    sections = [
        Section(heading, by, document_of(answer, by))
        for (heading, by, _), answer in zip(SECTIONS, answers, strict=True)
    ]
    days = document_of(of_days, DAYS[0])
    made = datetime.fromtimestamp(time.time(), UTC).strftime("%Y-%m-%d %H:%M UTC")
    try:
        out.write_text(page_of(f"GPU energy of {month}", made, sections, days), encoding="utf-8")
    except OSError as error:
        raise click.UsageError(f"--out: {out}: {error.strerror}; name a file that can be written") from None
    if pdf is not None:
        _print(browser, out, pdf)
    if settings.headers:
        click.echo(f"{out}" + (f"\n{pdf}" if pdf is not None else ""))


def _last_month(now_s: float) -> str:
    now = datetime.fromtimestamp(now_s, UTC)
    return f"{now.year - (now.month == 1)}-{now.month - 1 or 12:02d}"


def _chromium() -> str:
    found = next(filter(None, map(shutil.which, _CHROMIUMS)), None)
    if found is None:
        raise click.UsageError(f"--pdf needs one of {', '.join(_CHROMIUMS)}; install one, or print the page of --out")
    return found


def _print(browser: str, page: Path, pdf: Path) -> None:
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser, "--headless", "--disable-gpu", "--no-sandbox", f"--user-data-dir={profile}", "--no-pdf-header-footer",
            f"--print-to-pdf={pdf.absolute()}", page.absolute().as_uri(),
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, timeout=_PDF_S, check=False)  # noqa: S603
        except subprocess.TimeoutExpired:
            raise click.ClickException(f"{browser} did not print within {_PDF_S:g} s; print {page} by hand") from None
    if done.returncode or not pdf.is_file():
        raise click.ClickException(f"{browser} failed to print; print {page} by hand")
