// What is going on and what to do first: headline figures, what needs attention, and who uses what.

import { ask, byId, count, el, gpus, isUsed, many, percent, refresh, show } from "./dom.js";
import { attentionList, attentionTitle } from "./attention.js";
import { sparkline } from "./power_view.js";
import { table } from "./table.js";
import { energyUnit, gpuUnit, moneyUnit, one, powerUnit } from "./units.js";
import { watchOverview } from "./overview.js";

const REASONS_SHOWN = 3;
let [stop, last, turn] = [() => {}, null, 0];
let picked = null; // {namespace, user}, {node, index} or {workload} that the map shows

export const nowView = {
  wide: false,
  open(panel, page) {
    last = null;
    byId("headlines").hidden = false;
    page.map.choose(-1);
    show(panel, el("p", { class: "quiet" }, "Waiting for the overview."));
    byId("headlines").replaceChildren();
    stop = watchOverview((found, error) => {
      const isFirst = !last;
      if (found) last = found;
      if (!last) show(panel, el("p", { class: "bad" }, error));
      else if (isFirst || !isUsed(panel)) draw(panel, page, isFirst ? show : refresh);
      if (picked) point(page);
    });
  },
  frame(panel, page) {
    if (last) drawHeadlines(page);
  },
  /** Somebody wants to see all of the map again. */
  leave(panel, page) {
    pick(page, null);
    if (last) draw(panel, page, refresh);
  },
  whole(panel, page) {
    if (picked) point(page);
  },
  close(page) {
    stop();
    turn += 1;
    pick(page, null);
    byId("headlines").hidden = true;
  },
};

function draw(panel, page, put) {
  const onPick = ({ currentTarget }) => {
    const { dataset } = currentTarget;
    const isAgain = currentTarget.getAttribute("aria-pressed") === "true";
    pick(page, isAgain ? null : { ...dataset });
    draw(panel, page, refresh);
  };
  drawHeadlines(page);
  put(panel,
    el("h2", {}, attentionTitle(last)),
    attentionList(last, page.model, onPick, isPicked),
    el("h2", {}, "Who uses what"),
    consumers(last, onPick));
}

const isPicked = (place) => picked !== null && ["namespace", "user", "node", "index", "workload"].every((name) => picked[name] === place[name]);

function consumers({ consumers: rows, consumers_in_all: inAll, consumers_left_out_milli: milli, today }, onPick) {
  if (!rows.length) {
    return el("p", { class: "quiet" }, "Nobody holds a GPU. Work that is submitted appears here; see ", el("a", { href: "#/workloads" }, "Workloads"), ".");
  }
  const more = inAll - rows.length;
  return [
    table("consumers", [["namespace"], ["user"], ["GPUs", gpuUnit], ["idle", true], ["power", powerUnit], ["today", energyUnit], ["cost", moneyUnit(today?.currency ?? "")]],
      rows.map((row) => Object.assign([
        el("button", { type: "button", class: "pick", "data-namespace": row.namespace, "data-user": row.user, onclick: onPick,
          "aria-pressed": String(isPicked({ namespace: row.namespace, user: row.user })),
          title: "Show its GPUs on the map" }, row.namespace || "no namespace"),
        row.user || "-", row.milli, row.gpus_idle, row.power_w, row.energy_j, row.cost,
      ], { kind: "acts" }))),
    more > 0 ? el("p", { class: "quiet" }, `and ${many(more, "other")} with ${gpus(milli)} ${milli === 1000 ? "GPU" : "GPUs"}`) : null,
  ];
}

/** What the map shows alone. */
function pick(page, place) {
  picked = place;
  const box = byId("highlighted");
  box.hidden = place === null;
  if (place === null) {
    page.map.highlight(null);
    page.map.choose(-1);
    return;
  }
  point(page);
  // In a small window the map lies below.
  const [main, area] = [document.querySelector("main"), byId("map-area")];
  if (area.offsetTop > byId("panel").offsetTop) main.scrollTop = area.offsetTop - main.offsetTop;
}

/** Finds what was picked on the map, whose cells may be others by now. */
async function point(page) {
  const { map, model } = page;
  const mine = (turn += 1);
  const place = picked;
  let cells = [];
  try {
    if (place.node) cells = model.cellsOf(place.node);
    else if (place.workload) cells = ((await ask("workload", { id: place.workload }))?.placements ?? []).flatMap((placement) => placement.cells);
    else {
      const held = await ask("held", { namespace: place.namespace, user: place.user });
      if (held.era !== model.era) return;
      cells = held.cells;
    }
  } catch {
    return; // the connection's sign tells of it
  }
  if (mine !== turn || picked !== place) return;
  map.highlight(cells);
  map.choose(place.index === undefined ? -1 : model.cellOf(place.node, Number(place.index)));
  const of = place.workload ?? place.node ?? [place.namespace, place.user].filter(Boolean).join(", ");
  const words = place.index !== undefined ? `${of} GPU ${place.index}` : `${many(cells.length, "GPU")} of ${of || "work without namespace"}`;
  refresh(byId("highlighted"), `The map shows ${words}. `, el("button", { type: "button", onclick: () => nowView.leave(byId("panel"), page) }, "Show all"));
}

function drawHeadlines(page) {
  const { power, today, capacity, promises, waiting, waits, attention } = last;
  const over = power.over_w > 0;
  const failing = attention.filter(({ kind }) => kind === "failing_gpu").length;
  const gone = capacity.gpus_lost + capacity.gpus_unreachable;
  refresh(byId("headlines"),
    figure("Power", "#/power", one(powerUnit, power.measured_w), over && "bad", [
      power.budget_w == null ? "no budget for the cluster"
        : [over ? `${one(powerUnit, power.over_w)} over the budget of ` : "of ", one(powerUnit, power.budget_w),
          power.measured_w == null ? "" : ` (${percent(power.measured_w / power.budget_w)})`],
      power.measured_gpus < power.gpus && `${count(power.measured_gpus)} of ${many(power.gpus, "GPU")} read`,
    ], sparkline(page.model.powerLine, power.budget_w)),
    figure("Today", null, today ? one(energyUnit, today.energy_j) : "-", "", today ? [
      `cost ${one(moneyUnit(today.currency), today.cost)}`,
      `${one(energyUnit, today.idle_j)} (${percent(today.energy_j ? today.idle_j / today.energy_j : 0)}) idle, cost ${one(moneyUnit(today.currency), today.idle_cost)}`,
    ] : ["the energy ledger has not answered yet"]),
    figure("Waiting", "#/queue", count(waits), "", waits ? [
      ...waiting.slice(0, REASONS_SHOWN).map((reason) => `${count(reason.workloads)}: ${reason.words}`),
      waiting.length > REASONS_SHOWN && `and ${many(waiting.length - REASONS_SHOWN, "other reason")}`,
    ] : ["all work has its place"]),
    figure("Promises broken", "#/promises", count(promises.broken), promises.broken && "bad",
      promises.broken + promises.kept + promises.at_risk + promises.unknown ? [
        [`${count(promises.kept)} kept`, promises.at_risk && `${count(promises.at_risk)} at risk`].filter(Boolean).join(", "),
        promises.unknown > 0 && `${count(promises.unknown)} not measured`,
      ] : ["nothing is promised"]),
    figure("GPUs failing", null, count(gone + failing), gone + failing && "bad", gone + failing + capacity.gpus_cordoned ? [
      [capacity.gpus_lost && `${count(capacity.gpus_lost)} lost`, failing && `${count(failing)} with faults`].filter(Boolean).join(", "),
      capacity.gpus_unreachable > 0 && `${count(capacity.gpus_unreachable)} on ${many(capacity.nodes_lost, "lost node")}`,
      capacity.gpus_cordoned > 0 && `${count(capacity.gpus_cordoned)} cordoned`,
    ] : [`all ${many(capacity.gpus, "GPU")} work`]),
    figure("GPUs idle", null, count(capacity.gpus_idle), capacity.gpus_idle && "warn", [
      `of ${gpus(capacity.held_milli)} held`, `${gpus(capacity.free_milli)} free`,
    ]));
}

/** One figure with what it means. */
function figure(title, href, value, kind, notes, drawing = null) {
  return el("div", { class: `figure${drawing ? " drawn" : ""}` },
    el("h2", {}, href ? el("a", { href }, title) : title),
    el("p", { class: kind ? `value ${kind}` : "value" }, value),
    drawing,
    notes.filter((note) => note && (Array.isArray(note) || note.length)).map((note) => el("p", { class: "quiet" }, note)));
}
