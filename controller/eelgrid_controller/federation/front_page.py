"""The page of a front: every cluster at a glance, and where each workload went and why, as HTML without scripts of others.

Owns what the page says and its routes; an endpoint for viewers serves it (server.http.live_server). Must not know how clusters are
called. Everything that a client or a cluster has said is escaped.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape

from aiohttp import web

from eelgrid_controller.clock import Clock
from eelgrid_controller.federation.dispatch import Dispatch
from eelgrid_controller.federation.front_service import FrontService
from eelgrid_controller.formatting import format_age
from eelgrid_controller.server.http.live_server import build_security_policy, load_static_files, read_style
from eelgrid_protos.messages import ClusterStatus, Workload

# The newest; eelctl workloads lists all.
_ROWS_MOST = 200
_REASON_LETTERS_MOST = 400
_SCRIPT = """// Draws the page anew every few seconds, unless somebody is reading a reason that is open.
const PERIOD_MS = 5000;
async function refresh() {
  const state = document.querySelector("#connection");
  try {
    const answer = await fetch("/", { cache: "no-store" });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const next = new DOMParser().parseFromString(await answer.text(), "text/html");
    if (!document.querySelector("details[open]")) {
      document.querySelector("main").replaceWith(next.querySelector("main"));
    }
    state.dataset.state = "live";
    state.textContent = "live";
  } catch (error) {
    state.dataset.state = "broken";
    state.textContent = `not up to date: ${error.message}`;
  }
  setTimeout(refresh, PERIOD_MS);
}
setTimeout(refresh, PERIOD_MS);
"""
_CSS = """main.front { display: block; padding: 12px 16px; overflow: auto; }
.front table { border-collapse: collapse; width: 100%; margin-bottom: 20px; background: var(--raised); }
.front .wide { overflow-x: auto; }
.front th, .front td { padding: 5px 10px; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
.front th { font-weight: 600; color: var(--quiet); white-space: nowrap; }
.front .n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.front meter { width: 90px; vertical-align: middle; }
.front .bad { color: var(--bad); font-weight: 600; }
.front h2 { font-size: 15px; margin: 4px 0 8px; }
.front summary { cursor: pointer; }
"""
HEADERS = {
    "Content-Security-Policy": build_security_policy("'self'"),
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class FrontPage:
    """The routes of one front's page."""

    def __init__(self, service: FrontService, find_dispatch: Callable[[str], Dispatch | None], clock: Clock) -> None:
        self._service, self._find_dispatch, self._clock = service, find_dispatch, clock
        self._files = {
            "front.css": ("text/css", read_style() + _CSS.encode()),
            "front.js": ("text/javascript", _SCRIPT.encode()),
            "mark.svg": ("image/svg+xml", load_static_files()["mark.svg"].plain),
        }

    @property
    def routes(self) -> Sequence[web.RouteDef]:
        """What is served."""
        return web.get("/", self._send_page), web.get("/{name}", self._send_file)

    async def _send_file(self, request: web.Request) -> web.Response:
        found = self._files.get(request.match_info["name"])
        if found is None:
            return web.Response(status=404, text="try /\n")
        return web.Response(body=found[1], content_type=found[0], charset="utf-8")

    async def _send_page(self, _request: web.Request) -> web.Response:
        clusters = await self._service.read_clusters()
        newest = sorted(self._service.list_shown(), key=lambda one: (one.phase.is_ended, -one.submitted_ns))[
            :_ROWS_MOST
        ]
        rows = [(one, self._find_dispatch(one.workload_id)) for one in newest]
        return web.Response(text=render_page(clusters, rows, now_ns=self._clock.now_ns()), content_type="text/html")


def render_page(
    clusters: Sequence[ClusterStatus], workloads: Iterable[tuple[Workload, Dispatch | None]], *, now_ns: int
) -> str:
    """Renders the page as HTML."""
    cluster_rows = "".join(_render_cluster(one, now_ns) for one in clusters)
    workload_rows = "".join(_render_workload(*one, now_ns=now_ns) for one in workloads)
    silent = sum(bool(one.problem) for one in clusters)
    state = f"{len(clusters)} clusters" + (f", <span class=bad>{silent} silent</span>" if silent else "")
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>Eelgrid: all clusters</title><link rel="icon" href="mark.svg">
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="stylesheet" href="front.css">
<script src="front.js" defer></script></head>
<body><header><h1>Eelgrid: all clusters</h1><p id="connection" data-state="live" role="status">live</p></header>
<main class="front" tabindex="-1">
<h2 id="clusters">{state}</h2>
<div class="wide" tabindex="0" role="region" aria-labelledby="clusters"><table><thead><tr><th scope="col">Cluster</th>
<th scope="col">State</th><th scope="col" class="n">GPUs in use</th><th scope="col" class="n">Power</th>
<th scope="col" class="n">Waiting</th><th scope="col" class="n">Oldest wait</th><th scope="col" class="n">Running</th>
<th scope="col" class="n">From here</th><th scope="col" class="n">Energy price</th><th scope="col" class="n">Carbon</th></tr></thead>
<tbody>{cluster_rows}</tbody></table></div>
<h2 id="workloads">Workloads of this front</h2>
<div class="wide" tabindex="0" role="region" aria-labelledby="workloads"><table><thead><tr><th scope="col">Workload</th>
<th scope="col">Name</th><th scope="col">User</th><th scope="col">Phase</th><th scope="col">Cluster</th>
<th scope="col" class="n">Age</th><th scope="col">Why</th></tr></thead>
<tbody>{workload_rows or '<tr><td colspan="7">None was submitted to this front.</td></tr>'}</tbody></table></div>
</main></body></html>
"""


def _render_cluster(one: ClusterStatus, now_ns: int) -> str:
    name = escape(one.name)
    link = f'<a href="{escape(one.page_url)}">{name}</a>' if one.page_url else name
    if one.summary is None:
        problem = escape(one.problem[:_REASON_LETTERS_MOST])
        return f'<tr><th scope="row">{link}</th><td class="bad" colspan="9">silent: {problem}</td></tr>'
    summary = one.summary
    lost = f', <span class="bad">{summary.nodes_lost} lost</span>' if summary.nodes_lost else ""
    used = summary.allocated_gpu_milli / 1000
    cells = (
        f"{used:g} of {summary.gpus} {_render_meter(used, summary.gpus, f'GPUs in use of {one.name}')}",
        _render_power(one, summary.measured_power_w),
        f"{summary.pending}",
        format_age((now_ns - summary.oldest_pending_ns) / 1e9) if summary.oldest_pending_ns else "-",
        f"{summary.placed}",
        f"{one.workloads}",
        "-" if one.price_per_kwh is None else f"{one.price_per_kwh:.3g} {escape(one.currency)}/kWh",
        "-" if one.carbon_kg_per_kwh is None else f"{1000 * one.carbon_kg_per_kwh:.0f} g/kWh",
    )
    numbers = "".join(f'<td class="n">{cell}</td>' for cell in cells)
    return f'<tr><th scope="row">{link}</th><td>{summary.nodes_ready} nodes{lost}</td>{numbers}</tr>'


def _render_power(one: ClusterStatus, power_w: float) -> str:
    if one.power_budget_w is None:
        return f"{power_w / 1000:.2f} kW"
    kind = ' class="bad"' if power_w > one.power_budget_w else ""
    meter = _render_meter(power_w, one.power_budget_w, f"Power against the budget of {one.name}")
    return f"<span{kind}>{power_w / 1000:.2f} of {one.power_budget_w / 1000:.2f} kW</span> {meter}"


def _render_meter(value: float, most: float, label: str) -> str:
    share = min(1.0, value / most) if most > 0 else 0.0
    return f'<meter min="0" max="1" value="{share:.3f}" aria-label="{escape(label)}">{share:.0%}</meter>'


def _render_workload(workload: Workload, dispatch: Dispatch | None, *, now_ns: int) -> str:
    spec, chosen = workload.spec, "" if dispatch is None else dispatch.chosen
    cluster = escape(chosen) or "none yet"
    if dispatch is not None and dispatch.moving_to:
        cluster += f", moving to {escape(dispatch.moving_to)}"
    age = format_age(max(0.0, (now_ns - workload.submitted_ns) / 1e9)) if workload.submitted_ns else "-"
    elements = "" if workload.array is None else f" ({workload.array.size} elements)"
    cells = (
        f'<th scope="row">{escape(workload.workload_id)}</th><td>{escape(spec.name)}{elements}</td>',
        f"<td>{escape(workload.owner or spec.user)}</td><td>{workload.phase.name.lower()}</td><td>{cluster}</td>",
        f'<td class="n">{age}</td><td>{"".join(_render_reason(workload, dispatch))}</td>',
    )
    return f"<tr>{''.join(cells)}</tr>"


def _render_reason(workload: Workload, dispatch: Dispatch | None) -> Iterator[str]:
    lines = [] if dispatch is None else [line[:_REASON_LETTERS_MOST] for line in dispatch.decision]
    copies = () if dispatch is None else dispatch.copies
    lines += [f"copy in {one.cluster}: {one.phase.value}{f' ({one.problem})' if one.problem else ''}" for one in copies]
    head = workload.reason[:_REASON_LETTERS_MOST] or (lines[0] if lines else "")
    if not lines:
        yield escape(head)
        return
    listed = "".join(f"<li>{escape(line)}</li>" for line in lines)
    yield f"<details><summary>{escape(head)}</summary><ul>{listed}</ul></details>"
