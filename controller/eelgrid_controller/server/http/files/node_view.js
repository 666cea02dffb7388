// One node: where it is, and its GPUs with what they read and hold.

import { el, gpuLink, gpus, many, refresh, show, terms, watts } from "./dom.js";
import { by, table } from "./table.js";
import { gpuUnit, powerUnit } from "./units.js";
import { CellState } from "./model.js";

let name = "";

export const nodeView = {
  wide: false,
  open(panel, page, parts) {
    name = parts.join("/"); // it may hold a slash
    page.map.choose(page.model.cellsOf(name)[0] ?? -1);
    draw(panel, page, show);
  },
  frame: (panel, page) => draw(panel, page, refresh),
};

function draw(panel, { model }, put) {
  const node = model.nodeByName.get(name);
  if (node === undefined) {
    put(panel, el("h2", {}, name), el("p", {}, "There is no such node (any more)."));
    return;
  }
  const cells = model.cellsOf(name);
  const read = cells.filter((cell) => model.power_w[cell] >= 0);
  const sum = (column, of) => of.reduce((total, cell) => total + column[cell], 0);
  const isLost = cells.some((cell) => model.state[cell] === CellState.NODE_LOST);
  put(panel, el("h2", {}, name),
    terms([
      ["state", cells.length ? el("span", { class: isLost && "bad" }, isLost ? "lost" : "ready") : null],
      ["place", model.nodes.rack[node] || null],
      ["pool", model.nodes.pool[node] || null],
      ["GPUs", [...new Set(cells.map((cell) => model.models[model.model[cell]]))].join(", ") || "none"],
      cells.length > 0 && ["held by work", `${gpus(sum(model.held_milli, cells))} of ${many(cells.length, "GPU")}`],
      cells.length > 0 && ["power", read.length ? `${watts(sum(model.power_w, read))}, of ${read.length} of ${many(cells.length, "GPU")}` : null],
    ]),
    cells.length > 0 && [
      el("h3", {}, "GPUs"),
      table("node-gpus", [["GPU"], ["power", powerUnit], ["held", gpuUnit], ["limit", powerUnit], ["state, MIG slices"]], cells.map((cell) => [
        by(model.index[cell], gpuLink(name, model.index[cell], `GPU ${model.index[cell]}`)), model.power_w[cell] < 0 ? null : model.power_w[cell],
        model.held_milli[cell], model.limitW[cell] || null, state(model, cell)])),
    ]);
}

function state(model, cell) {
  const cut = (model.slices.get(cell) ?? []).map(([, , profile]) => profile).join(", ");
  const is = model.state[cell];
  if (is >= CellState.CORDONED) return el("span", { class: "bad" }, ["cordoned", "lost", "node lost"][is - CellState.CORDONED], cut && ` (${cut})`);
  return cut || (is === CellState.CUT ? "cut, no slice" : "");
}
