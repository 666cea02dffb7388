"""eelctl report: a monthly report of energy, cost and carbon as one HTML page, and as PDF where Chromium is installed.

Sections, tables and the chart are plain HTML and SVG without scripts or network access.
"""

import math
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import click

from eelgrid_controller.cli.connection import CliError, CliSettings, connect_operators, output_option
from eelgrid_controller.cli.energy import (
    energy_document,
    format_minute,
    format_per_unit,
    format_work,
    largest_per_unit,
    period_ns,
)
from eelgrid_controller.cli.output import print_plain
from eelgrid_controller.formatting import format_money
from eelgrid_protos.messages import EnergyGrouping, QueryEnergyReportRequest
from eelgrid_protos.safe_text import escape_text

_KWH = 3.6e6
_STYLE = """
:root { color-scheme: light; }
body { font: 14px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 62rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .3rem 0; } .dim { color: #595959; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: .8rem; margin: 1.2rem 0; }
.figure { border: 1px solid #d0d0d0; border-radius: 6px; padding: .6rem .9rem; }
.figure b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
.figure small { display: block; color: #595959; font-size: .85rem; font-variant-numeric: tabular-nums; }
.note { border-left: 4px solid #e0932f; padding: .3rem .8rem; background: #fdf6ec; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; border-bottom: 2px solid #888; font-weight: 600; }
td { border-bottom: 1px solid #e2e2e2; }
th, td { padding: .25rem .5rem; vertical-align: top; }
th.n, td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.name { overflow-wrap: anywhere; min-width: 8rem; }
tr.sum td { font-weight: 600; border-top: 2px solid #888; } tr.rest td { color: #595959; }
svg { width: 100%; height: auto; display: block; } svg text { font: 11px system-ui, sans-serif; fill: #595959; }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; vertical-align: baseline; }
@media print { body { margin: 0; padding: 0; max-width: none; font-size: 11px; print-color-adjust: exact; }
  tr, .figure, svg { break-inside: avoid; } h2 { break-after: avoid; } .wide { overflow: visible; } }
@page { size: A4; margin: 15mm; }
"""
_TITLES = {"title": "workload", "gpu_model": "GPU model"}
_ACTIVE, _IDLE = "#1f5fa8", "#e0932f"


class ReportSection(NamedTuple):
    """One table: its heading, the names that rows are grouped by, and the document of eelctl energy."""

    heading: str
    by: tuple[str, ...]
    document: dict[str, Any]


def render_report(title: str, made: str, sections: Sequence[ReportSection], days: dict[str, Any]) -> str:
    """Renders the page; `days` is the document by day. Escapes all names, which came from elsewhere."""
    whole = sections[0].document
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="dim">{escape(format_minute(whole["begin"]))} to {escape(format_minute(whole["end"]))} UTC; made {escape(made)}</p>',
        _so_far(whole, made),
        _describe_damage([*(section.document for section in sections), days]),
        _figures(whole),
        _sums(whole),
        _largest(sections[0]),
        "<h2>Energy by day</h2>",
        _trend(days, made),
    ]
    for section in sections:
        body += [f"<h2>{escape(section.heading)}</h2>", _table(section)]
    body += ["<h2>How energy is counted</h2>", _METHOD]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n<body><main>\n'
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


_METHOD = """<ul class="dim">
<li>Energy is that of the GPUs themselves, from their own counters where they have them; processors, memory and fans of
their nodes are not counted.</li>
<li>It is divided among those who used or held the GPUs, so that the rows of each table add up to its total. <i>Idle</i>
is what boards and open contexts draw without work. <i>Unallocated</i> is what GPUs drew that were allocated to nobody;
<i>unattributed</i> is what was used by work whose owner is not known.</li>
<li>Cost and carbon are computed from energy times PUE (the overhead of the building), with the price and the carbon
intensity of the hour in which the energy was used.</li>
<li>Days and hours are in UTC. &ge; and &le; mark sums for which not all work was counted.</li>
</ul>"""


def _text(name: str) -> str:
    """Escapes a name that came from elsewhere: neither markup nor characters that change the reading order remain."""
    return escape(escape_text(name))


def _so_far(document: dict[str, Any], made: str) -> str:
    """Returns a note if the month is not over, so that it is not read as a whole one."""
    if made[:16] >= format_minute(document["end"]):
        return ""
    return f'<p class="note">This month is not over: the figures are up to {escape(made)}.</p>'


def _describe_damage(documents: Sequence[dict[str, Any]]) -> str:
    """Returns a note on damaged parts of the ledger, which no figure counts: the report must not look complete."""
    parts = dict.fromkeys(part for document in documents for part in document.get("damaged", ()))
    if not parts:
        return ""
    listed = "; ".join(map(_text, parts))
    return f'<p class="note">Parts of the ledger are damaged and not counted, so the figures are too low: {listed}.</p>'


def _largest(section: ReportSection) -> str:
    """Describes the largest groups in a sentence."""
    groups, total_j = section.document["groups"], section.document["total"]["energy_j"]
    if not groups or not total_j:
        return ""
    told = [
        f"{_text(' '.join(str(row[name]) for name in section.by if row[name]) or 'without a name')} "
        f"{_format_share(row['energy_j'], total_j)}"
        for row in groups[:3]
    ]
    return f"<p>The largest {escape(section.heading.lower())}: {', '.join(told)} of all energy.</p>"


def _kwh(energy_j: float) -> str:
    value = energy_j / _KWH
    return f"{value:,.0f}" if value >= 1000.0 else f"{value:,.1f}" if value >= 10.0 or not value else f"{value:,.3f}"


def _kg(carbon_g: float | None, unit: str = "") -> str:
    return "-" if carbon_g is None else f"{carbon_g / 1000.0:,.1f}{unit}"


def _format_share(part: float, whole: float) -> str:
    return f"{100.0 * part / whole:.1f} %" if whole else ""


def _figures(document: dict[str, Any]) -> str:
    total, currency = document["total"], document["currency"]
    found = [("energy of the GPUs", f"{_kwh(total['energy_j'])} kWh", f"± {_kwh(document['uncertainty_j'])} kWh")]
    kwh, cost, carbon_g = total["energy_j"] / _KWH, total["cost"], total["carbon_g"]
    found += [
        ("cost", format_money(cost, currency), f"{cost / kwh:.3f} per kWh" if kwh and cost is not None else ""),
        (
            "carbon dioxide",
            _kg(carbon_g, " kg"),
            f"{carbon_g / kwh:,.0f} g per kWh" if kwh and carbon_g is not None else "",
        ),
    ]
    for name, part in (("unallocated", "unallocated"), ("unattributed", "unattributed")):
        of_part = document[part]
        is_priced = of_part["cost"] is not None
        money = format_money(of_part["cost"], currency) if is_priced else f"{_kwh(of_part['energy_j'])} kWh"
        found.append((name, _format_share(document[part]["energy_j"], total["energy_j"]) or "-", money))
    found.append(
        ("idle, of all", _format_share(total["idle_j"], total["energy_j"]) or "-", f"{_kwh(total['idle_j'])} kWh")
    )
    cells = (
        f'<div class="figure"><b>{escape(value)}</b>{escape(name)}<small>{escape(more)}</small></div>'
        for name, value, more in found
    )
    return f'<div class="figures">{"".join(cells)}</div>'


def _sums(document: dict[str, Any]) -> str:
    total_j, measured_j = document["total"]["energy_j"], document["measured_j"]
    said = (
        "which is what the GPUs measured"
        if abs(total_j - measured_j) < 1.0
        else (f"where the GPUs measured {_kwh(measured_j)} kWh")
    )
    lines = [f"<p>All parts together are {_kwh(total_j)} kWh, {said}, ± {_kwh(document['uncertainty_j'])} kWh.</p>"]
    if not document["currency"]:
        lines.append(
            '<p class="note">No prices are set, so the report has no cost and carbon; set them with eelctl policy set --prices.</p>'
        )
    if document["uncounted_s"]:
        hours = document["uncounted_s"] / 3600.0
        lines.append(f'<p class="note">{hours:,.1f} GPU-hours were not measured and are not counted.</p>')
    return "".join(lines)


def _table(section: ReportSection) -> str:
    document, currency = section.document, section.document["currency"]
    total = document["total"]
    is_told = any(row["work"] for row in document["groups"])
    largest_j = largest_per_unit([row["work"] for row in document["groups"]])
    numbers: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("kWh", lambda row: _kwh(row["energy_j"])),
        ("share", lambda row: _format_share(row["energy_j"], total["energy_j"])),
        ("idle", lambda row: _format_share(row["idle_j"], row["energy_j"])),
    ]
    if is_told:
        numbers += [
            ("work", lambda row: _lines(format_work, row, ">= ", "≥ ")),
            ("for each", lambda row: _lines(lambda work: format_per_unit(work, largest_j), row, "<= ", "≤ ")),
        ]
    numbers += [
        (currency or "cost", lambda row: "-" if row["cost"] is None else f"{row['cost']:,.2f}"),
        ("kg CO₂", lambda row: _kg(row["carbon_g"])),
    ]
    others = [
        {section.by[0]: name} | document[part]
        for name, part in (
            (f"{document['left_out'].get('groups', 0)} others", "left_out"),
            ("unallocated", "unallocated"),
            ("unattributed", "unattributed"),
        )
        if document[part]["energy_j"]
    ]
    head = "".join(f'<th scope="col">{escape(_TITLES.get(name, name))}</th>' for name in section.by) + "".join(
        f'<th class="n" scope="col">{escape(name)}</th>' for name, _ in numbers
    )
    rows = [*((row, "") for row in document["groups"]), *((row, ' class="rest"') for row in others)]
    rows.append(({section.by[0]: "Total"} | total, ' class="sum"'))
    lines = []
    for row, kind in rows:
        cells = [f'<td class="name">{_text(str(row.get(name, ""))) or "&ndash;"}</td>' for name in section.by]
        cells += [f'<td class="n">{escape(of(row)).replace(chr(10), "<br>")}</td>' for _, of in numbers]
        lines.append(f"<tr{kind}>{''.join(cells)}</tr>")
    return f'<div class="wide" tabindex="0" role="group" aria-label="{escape(section.heading)}"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _lines(text_of: Callable[[Sequence[dict[str, Any]]], str], row: dict[str, Any], sign: str, shown: str) -> str:
    """Formats a line per unit."""
    return "\n".join(text_of([one]) for one in row.get("work", ())).replace(sign, shown)


def _round_up(value: float) -> float:
    """Rounds up to 1, 2, 3, 4, 5, 6, 8 or 10 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next((step * power for step in (1, 2, 3, 4, 5, 6, 8) if step * power >= value), 10.0 * power)


def _trend(document: dict[str, Any], made: str) -> str:
    """Describes the days in a sentence and a bar chart."""
    told = {row["day"]: row for row in document["groups"]}
    if not told:
        return "<p>No energy was attributed to an owner.</p>"
    nothing = {"energy_j": 0.0, "active_j": 0.0, "idle_j": 0.0}
    day, last = date.fromisoformat(document["begin"][:10]), date.fromisoformat(min(document["end"], made)[:10])
    days = []
    # A month's end is the first of the next, which is none of its days.
    while day <= last and day.isoformat() < document["end"][:10]:
        days.append({"day": day.isoformat()} | told.get(day.isoformat(), nothing))
        day += timedelta(days=1)
    most, least = (pick(told.values(), key=lambda row: float(row["energy_j"])) for pick in (max, min))
    mean_j = sum(row["energy_j"] for row in told.values()) / len(told)
    missing = len(days) - len(told)
    quiet = f" On {missing} {'day' if missing == 1 else 'days'} no energy was attributed." if missing > 0 else ""
    words = (
        f"<p>A day took {_kwh(mean_j)} kWh on average, at most {_kwh(most['energy_j'])} kWh on {escape(most['day'])}, at least "
        f"{_kwh(least['energy_j'])} on {escape(least['day'])}.{quiet}</p>"
    )
    return words + _chart(days)


def _chart(days: Sequence[dict[str, Any]]) -> str:
    """Draws a bar per day, idle stacked on active, as SVG with a tooltip per bar."""
    width, height, left, foot = 900.0, 220.0, 50.0, 22.0
    most_kwh = _round_up(max(row["energy_j"] for row in days) / _KWH or 1.0)
    step = (width - left) / max(len(days), 7)
    high = height - foot - 14.0
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = height - foot - high * share
        parts.append(
            f'<line x1="{left}" x2="{width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d8d8d8"/>'
            f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{most_kwh * share:,.4g}</text>'
        )
    for place, row in enumerate(days):
        x, y = left + step * (place + 0.12), height - foot
        told = f"{row['day']}: {_kwh(row['energy_j'])} kWh, {_format_share(row['idle_j'], row['energy_j'])} idle"
        parts.append(f"<g><title>{escape(told)}</title>")
        for energy_j, colour in ((row["active_j"], _ACTIVE), (row["idle_j"], _IDLE)):
            tall = high * energy_j / _KWH / most_kwh
            y -= tall
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{step * 0.76:.1f}" height="{tall:.1f}" fill="{colour}"/>'
            )
        parts.append("</g>")
        if len(days) <= 16 or place % 2 == 0:
            parts.append(
                f'<text x="{x + step * 0.38:.1f}" y="{height - 6}" text-anchor="middle">{escape(row["day"][-2:])}</text>'
            )
    return (
        f'<p class="dim">kWh<span class="key" style="background:{_ACTIVE}"></span>active'
        f'<span class="key" style="background:{_IDLE}"></span>idle</p>'
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="Energy by day in kWh">{"".join(parts)}</svg>'
    )


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
@click.option("--month", metavar="YYYY-MM", help="A calendar month (UTC); last month by default.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="HTML file to write.")
@click.option(
    "--pdf", type=click.Path(path_type=Path, dir_okay=False), help="Also write a PDF file, printed by Chromium."
)
@output_option
@click.pass_obj
def report(settings: CliSettings, *, month: str | None, out: Path, pdf: Path | None) -> None:
    """Write a monthly report of energy, cost and carbon as an HTML page, or as PDF.

    The page is one self-contained file, without scripts and network access. Its numbers are those of eelctl energy.

    \b
    eelctl report --month 2026-10 --out october.html --pdf october.pdf
    """  # noqa: D301
    browser = _chromium() if pdf is not None else ""
    for option, path in (("--out", out), ("--pdf", pdf)):
        if path is not None and (not path.name or not path.parent.is_dir()):
            raise click.BadParameter(
                f"no file can be written at {str(path)!r}; name one in a folder", param_hint=option
            )
    month = month or _last_month(time.time())
    begin_ns, end_ns = period_ns(0, month, now_ns=0)
    request = QueryEnergyReportRequest(
        begin_ns=begin_ns,
        end_ns=end_ns,
        groupings=tuple(
            EnergyGrouping(group_by=by, rows_most=rows)
            for by, rows in (*((by, rows) for _, by, rows in SECTIONS), DAYS)
        ),
    )
    with connect_operators(settings) as client:
        *answers, of_days = client.query_energy_report(request, timeout=settings.timeout_s).answers
    sections = [
        ReportSection(heading, by, energy_document(answer, by))
        for (heading, by, _), answer in zip(SECTIONS, answers, strict=True)
    ]
    days = energy_document(of_days, DAYS[0])
    made = datetime.fromtimestamp(time.time(), UTC).strftime("%Y-%m-%d %H:%M UTC")
    try:
        out.write_text(render_report(f"GPU energy of {month}", made, sections, days), encoding="utf-8")
    except OSError as error:
        raise click.UsageError(f"--out: {out}: {error.strerror}; name a writable file") from None
    if pdf is not None:
        _print(browser, out, pdf)
    written = {"out": str(out), **({} if pdf is None else {"pdf": str(pdf)})}
    print_plain(settings, written, written.values() if settings.headers else ())


def _last_month(now_s: float) -> str:
    now = datetime.fromtimestamp(now_s, UTC)
    return f"{now.year - (now.month == 1)}-{now.month - 1 or 12:02d}"


def _chromium() -> str:
    found = next(filter(None, map(shutil.which, _CHROMIUMS)), None)
    if found is None:
        raise click.UsageError(
            f"--pdf needs one of {', '.join(_CHROMIUMS)}; install one, or print the page that --out wrote"
        )
    return found


def _print(browser: str, page: Path, pdf: Path) -> None:
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser,
            "--headless",
            "--disable-gpu",
            "--no-sandbox",
            f"--user-data-dir={profile}",
            "--no-pdf-header-footer",
            f"--print-to-pdf={pdf.absolute()}",
            page.absolute().as_uri(),
        ]
        try:
            done = subprocess.run(command, capture_output=True, timeout=_PDF_S, check=False)  # noqa: S603
        except subprocess.TimeoutExpired:
            raise CliError(f"{browser} did not print within {_PDF_S:g} s", f"print {page} by hand") from None
    if done.returncode or not pdf.is_file():
        raise CliError(f"{browser} failed to print {pdf}", f"check that it can be written, or print {page} by hand")
