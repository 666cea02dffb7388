// Measured points of a profile: rate against power, and those that no other beats in both.

import { ask, count, el, show, svg, watts } from "./dom.js";
import { command } from "./command.js";
import { by, table } from "./table.js";
import { powerUnit } from "./units.js";
import { chartWidth, steps } from "./power_view.js";

const [HEIGHT, LEFT, BOTTOM] = [360, 70, 44];
let turn = 0;

export const frontierView = {
  wide: true,
  async open(panel, page, [profile, model]) {
    const mine = (turn += 1);
    try {
      const found = await ask("points", { profile: profile ?? "", model: model ?? "" });
      if (mine === turn) show(panel, el("h2", {}, "Frontier: rate against power"), found.points.length ? told(found, chartWidth(panel)) : how());
    } catch (error) {
      if (mine === turn) show(panel, el("p", { class: "bad" }, error.message));
    }
  },
  close() {
    turn += 1;
  },
};

const how = () => [
  el("p", {}, "The controller knows no measured point yet. Points come"),
  el("ul", {},
    el("li", {}, "from a file that you measured: ", command("eelctl profile import points.csv")),
    el("li", {}, "from jobs with a promise that it steers: they appear by themselves while these run."),
  ),
  el("p", {}, "The frontier of energy against latency for the fleet as it runs: ", command("eelctl frontier --running --plot frontier.png")),
];

/** A field that leads to another picture. */
function choice(id, names, chosen, parts) {
  const field = el("select", { id, onchange: () => { location.hash = `#/frontier/${parts(field.value).map(encodeURIComponent).join("/")}`; } },
    names.map((name) => el("option", { value: name, selected: name === chosen }, name)));
  return field;
}

// Of one GPU model at a time: a rate on one says nothing of a rate on another, and their watts differ tenfold.
function told({ profiles, profile, models, model, points, points_in_all: inAll }, width) {
  const drawn = points.filter((point) => point.power_w);
  const best = front(drawn);
  return [
    el("div", { class: "fields" },
      el("label", { for: "profile" }, "Profile"), choice("profile", profiles, profile, (name) => [name]),
      el("label", { for: "gpu-model" }, "GPU"), choice("gpu-model", models, model, (name) => [profile, name])),
    drawn.length ? el("div", { class: "scroll" }, chart(drawn, best, width)) : el("p", { class: "quiet" }, "None of its points has a power."),
    el("h3", {}, inAll > points.length ? `The first ${count(points.length)} of ${count(inAll)} points` : "Points"),
    table("points", [["MIG"], ["GPUs", true], ["batch", true], ["limit", powerUnit], ["rate, 1/s", true], ["power", powerUnit], ["J each", true], ["source"]],
      points.map((point) => {
        const row = [point.mig || "-", point.gpus, point.batch, point.limit_w || "default",
          by(point.rate_hz, point.rate_hz.toPrecision(4)), point.power_w, point.power_w ? (point.power_w / point.rate_hz).toPrecision(3) : null, point.source || "-"];
        row.kind = best.includes(point) ? "chosen" : "";
        return row;
      })),
    el("p", { class: "quiet" }, "In bold: no other point has a higher rate at no more power."),
  ];
}

function front(points) {
  let most = -1;
  return [...points].sort((one, other) => one.power_w - other.power_w || other.rate_hz - one.rate_hz)
    .filter((point) => point.rate_hz > most && ((most = point.rate_hz), true));
}

function chart(points, best, width) {
  const [mostW, mostHz] = [Math.max(...points.map((one) => one.power_w)) * 1.08, Math.max(...points.map((one) => one.rate_hz)) * 1.08];
  const x = (power) => LEFT + ((width - LEFT - 14) * power) / mostW;
  const y = (rate) => HEIGHT - BOTTOM - ((HEIGHT - BOTTOM - 10) * rate) / mostHz;
  const grid = [];
  const [stepW, stepHz] = [steps(mostW), steps(mostHz)];
  for (let rate = 0; rate <= mostHz; rate += stepHz) {
    grid.push(svg("line", { class: "grid", x1: LEFT, x2: width - 14, y1: y(rate), y2: y(rate) }),
      svg("text", { x: LEFT - 8, y: y(rate) + 4, "text-anchor": "end" }, Number(rate.toPrecision(6))));
  }
  for (let power = 0; power <= mostW; power += stepW) {
    grid.push(svg("text", { x: x(power), y: HEIGHT - BOTTOM + 16, "text-anchor": "middle" }, watts(power)));
  }
  return svg("svg", { class: "chart", viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": `${points.length} points of rate against power; the table has them` },
    grid,
    svg("text", { x: (LEFT + width) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, "power, W"),
    svg("text", { x: 14, y: HEIGHT / 2, "text-anchor": "middle", transform: `rotate(-90 14 ${HEIGHT / 2})` }, "rate, 1/s"),
    svg("polyline", { class: "front", points: best.map((one) => `${x(one.power_w).toFixed(1)},${y(one.rate_hz).toFixed(1)}`).join(" ") }),
    points.map((one) => svg("circle", { class: best.includes(one) ? "dot best" : "dot", cx: x(one.power_w), cy: y(one.rate_hz), r: 4 })));
}
