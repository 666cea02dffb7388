// Power against budget: the line of the last minutes, and each budget as a bar.

import { clock, count, el, percent, refresh, show, svg, watts, zone } from "./dom.js";
import { command } from "./command.js";
import { by, table } from "./table.js";
import { powerUnit } from "./units.js";

const [HEIGHT, LEFT, BOTTOM, TOP] = [300, 70, 26, 12];
const GAP_MS = 10_000; // points come each second while anything is read

export const powerView = {
  wide: true,
  open: (panel, page) => draw(panel, page, show),
  frame: (panel, page) => draw(panel, page, refresh),
};

function draw(panel, { model }, put) {
  const limit = model.budgets.find(([name]) => name === "cluster")?.[1] ?? null;
  put(panel,
    el("h2", {}, `Power: ${model.powerNow() === null ? "no reading" : watts(model.powerNow())}${limit ? ` of ${watts(limit)}` : ""}`),
    model.powerLine.length > 1 ? el("div", { class: "scroll" }, chart(model.powerLine, limit, chartWidth(panel))) : el("p", { class: "quiet" }, "Too few readings for a line yet."),
    el("p", { class: "quiet" }, "The sum of fresh GPU readings, by the second, of the last ten minutes at most. Prometheus has the past. ", zone()),
    el("h3", {}, "Budgets"),
    model.budgets.length ? table("budgets", [["budget"], ["limit", powerUnit], ["measured", powerUnit], ["left", powerUnit], ["claimed", powerUnit], ["GPUs read", true], ["used", true]],
      model.budgets.map((one) => Object.assign([one[0], one[1], measured(one), left(one), claimed(one),
        by(one[3], `${count(one[3])} of ${count(one[4])}`), used(one)], { kind: isOver(one) ? "over" : "" })))
      : noBudgets());
}

// Of budgets: [name, limit, measured, GPUs read, GPUs, claimed]; of none read there is no sum. GPUs claim something.
const measured = ([, , power, read]) => (read ? power : null);
const left = ([, limit, power, read]) => (read ? limit - power : null);
const claimed = ([, , , , gpus, power]) => (gpus && !power ? null : power);
const isOver = ([, limit, power, read]) => read > 0 && power > limit;
const used = (one) => (one[3] ? by(one[2] / Math.max(1, one[1]), el("span", { class: "used" }, bar(one), percent(one[2] / Math.max(1, one[1])))) : null);
const noBudgets = () => el("p", { class: "quiet" }, "No budget is set; this sets one: ", command("eelctl policy set --budget cluster=50000W"));

function bar([, limit, power]) {
  const fill = el("span");
  fill.style.width = `${Math.min(100, (100 * power) / Math.max(1, limit))}%`;
  return el("span", { class: "bar" }, fill);
}

export function budgetBars(budgets) {
  if (!budgets.length) return noBudgets();
  return table("budget-bars", [["budget"], ["measured", powerUnit], ["limit", powerUnit], ["used", true]],
    budgets.map((one) => Object.assign([one[0], measured(one), one[1], used(one)], { kind: isOver(one) ? "over" : "" })));
}

export function steps(most, wanted = 5) {
  const rough = most / wanted;
  const unit = 10 ** Math.floor(Math.log10(rough));
  return unit * [1, 2, 5, 10].find((factor) => factor * unit >= rough);
}

/** Of a drawing as wide as there is room, so that its newest part is in sight on a phone, too. */
export const chartWidth = (panel) => Math.max(300, Math.min(900, panel.clientWidth - 32));

function chart(line, limit, width) {
  const [first, last] = [line[0][0], line.at(-1)[0]];
  const most = Math.max(limit ?? 0, ...line.map(([, power]) => power), 1) * 1.08;
  const x = (ms) => LEFT + ((width - LEFT - 14) * (ms - first)) / Math.max(1, last - first);
  const y = (power) => HEIGHT - BOTTOM - ((HEIGHT - BOTTOM - TOP) * power) / most;
  const step = steps(most);
  const grid = [];
  for (let power = 0; power <= most; power += step) {
    grid.push(svg("line", { class: "grid", x1: LEFT, x2: width - 14, y1: y(power), y2: y(power) }),
      svg("text", { x: LEFT - 8, y: y(power) + 4, "text-anchor": "end" }, watts(power)));
  }
  const times = (width < 600 ? [0, 1] : [0, 1 / 3, 2 / 3, 1]).map((part) => first + part * (last - first));
  const label = `Power from ${clock(first)} to ${clock(last)}: now ${watts(line.at(-1)[1])}${limit ? `, budget ${watts(limit)}` : ""}`;
  return svg("svg", { class: "chart", viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": label },
    grid,
    times.map((ms, at) => svg("text", { x: x(ms), y: HEIGHT - 8, "text-anchor": at === 0 ? "start" : at < times.length - 1 ? "middle" : "end" }, clock(ms))),
    limit ? [svg("line", { class: "limit", x1: LEFT, x2: width - 14, y1: y(limit), y2: y(limit) }),
      svg("text", { x: width - 18, y: y(limit) - 5, "text-anchor": "end" }, "budget of the cluster")] : [],
    runs(line).map((run) => svg("polyline", { class: "line", points: run.map(([ms, power]) => `${x(ms).toFixed(1)},${y(power).toFixed(1)}`).join(" ") })));
}

const [SPARK_WIDTH, SPARK_HEIGHT] = [200, 44];

/** The line of the last minutes without axes, with the line of the budget. */
export function sparkline(line, limit) {
  if (line.length < 2) return null;
  const [first, last] = [line[0][0], line.at(-1)[0]];
  const most = Math.max(limit ?? 0, ...line.map(([, power]) => power), 1) * 1.05;
  const x = (ms) => (SPARK_WIDTH * (ms - first)) / Math.max(1, last - first);
  const y = (power) => SPARK_HEIGHT - ((SPARK_HEIGHT - 2) * power) / most;
  const minutes = Math.max(1, Math.round((last - first) / 60_000));
  const label = `Power of the last ${minutes === 1 ? "minute" : `${minutes} minutes`}${limit ? ", with the line of the budget" : ""}`;
  return svg("svg", { class: "spark", viewBox: `0 0 ${SPARK_WIDTH} ${SPARK_HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    runs(line).map((run) => svg("polyline", { class: "line", points: run.map(([ms, power]) => `${x(ms).toFixed(1)},${y(power).toFixed(1)}`).join(" ") })),
    limit ? svg("line", { class: "limit", x1: 0, x2: SPARK_WIDTH, y1: y(limit), y2: y(limit) }) : []);
}

/** The line in parts: where nothing was read for a while nothing is drawn. */
function runs(line) {
  const parts = [];
  line.forEach((point, at) => {
    if (at === 0 || point[0] - line[at - 1][0] > GAP_MS) parts.push([]);
    parts.at(-1).push(point);
  });
  return parts;
}
