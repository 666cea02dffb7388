// The whole fleet in numbers, beside the map.

import { count, el, refresh, show } from "./dom.js";
import { command } from "./command.js";
import { budgetBars } from "./power_view.js";
import { table } from "./table.js";
import { gpuUnit, powerUnit } from "./units.js";
import { changeRow } from "./history_view.js";

export const fleetView = {
  wide: false,
  open(panel, page) {
    page.map.choose(-1);
    draw(panel, page, show);
  },
  frame: (panel, page) => draw(panel, page, refresh), // what keys chose on the map stays chosen
};

function draw(panel, { model }, put) {
  const sums = model.models.map((name) => ({ name, gpus: 0, held: 0, power: 0, read: 0 }));
  for (let cell = 0; cell < model.size; cell += 1) {
    const sum = sums[model.model[cell]];
    sum.gpus += 1;
    sum.held += model.held_milli[cell];
    if (model.power_w[cell] >= 0) {
      sum.power += model.power_w[cell];
      sum.read += 1;
    }
  }
  put(panel,
    el("h2", {}, "Fleet"),
    model.size ? null : el("p", {}, "No node has joined. Start the agent on one: ", command("eelgrid-agent --controller HOST:PORT")),
    model.size > 0 && table("models", [["model"], ["GPUs", true], ["held", gpuUnit], ["power", powerUnit], ["read", true]],
      sums.sort((one, other) => other.power - one.power).map((sum) => [
        sum.name, count(sum.gpus), sum.held, sum.read ? sum.power : null, count(sum.read)])),
    el("h3", {}, "Power against budget"),
    budgetBars(model.budgets.slice(0, 5)),
    el("h3", {}, "Latest changes"),
    model.changes.length ? table("latest", [["time"], ["what"], ["of"]], model.changes.slice(-8).reverse().map((change) => changeRow(change)), { search: false })
      : el("p", { class: "quiet" }, "None since the controller's start; ", el("a", { href: "#/history" }, "History"), " has those before."),
  );
}
