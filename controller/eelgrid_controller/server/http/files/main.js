// The page: which view is open, and who hears of a frame.

import { byId, count, el, isUsed, many, scrollable, show, watts } from "./dom.js";
import { FleetMap } from "./map.js";
import { listen } from "./map_input.js";
import { Model } from "./model.js";
import { follow } from "./stream.js";
import { fleetView } from "./fleet_view.js";
import { frontierView } from "./frontier_view.js";
import { gpuView } from "./gpu_view.js";
import { historyView } from "./history_view.js";
import { nowView } from "./now_view.js";
import { nodeView } from "./node_view.js";
import { powerView } from "./power_view.js";
import { promisesView } from "./promises_view.js";
import { queueView } from "./queue_view.js";
import { searchView } from "./search_view.js";
import { workloadView } from "./workload_view.js";

// By the first part of the address after #: a view is {wide, open(panel, page, parts), frame?(), whole?(), leave?(), close?()}.
const VIEWS = {
  now: nowView, fleet: fleetView, node: nodeView, gpu: gpuView, workload: workloadView, workloads: searchView, queue: queueView,
  promises: promisesView, power: powerView, history: historyView, decision: historyView, frontier: frontierView,
};
const UNDER = { node: "fleet", gpu: "fleet", workload: "workloads", decision: "history" };
const model = new Model();
const page = { model, map: new FleetMap(model) };
let view = null;
window.eelgrid = page; // for the curious, and for tests

/** A part of the address as it was meant; one that people typed may hold a bare %. */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function route() {
  const [name, ...parts] = location.hash.replace(/^#\/?/, "").split("/").map(decoded);
  view?.close?.(page);
  view = VIEWS[name] ?? nowView;
  document.body.toggleAttribute("data-wide", view.wide);
  document.body.toggleAttribute("data-now", view === nowView);
  glance();
  for (const link of document.querySelectorAll("nav a")) {
    const isHere = link.getAttribute("href") === `#/${UNDER[name] ?? (VIEWS[name] ? name : "now")}`;
    if (isHere) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  byId("panel").scrollTop = 0;
  for (const box of byId("panel").querySelectorAll(".scroll")) box.scrollLeft = 0;
  document.title = `${document.querySelector("nav a[aria-current]").textContent}${parts.length ? ` ${parts.join(" ")}` : ""} - Eelgrid`;
  if (model.ready) view.open(byId("panel"), page, parts);
  else show(byId("panel"), el("p", { class: "quiet" }, "Waiting for the controller."));
}

function glance() {
  const { counts } = model;
  if (!counts) return;
  const power = model.powerNow();
  byId("counts").textContent = [
    `${many(model.size, "GPU")} in ${many(counts.nodes, "node")}`, counts.nodes_lost ? `${many(counts.nodes_lost, "node")} lost` : "",
    counts.gpus_lost ? `${many(counts.gpus_lost, "GPU")} lost` : "",
    ...(view === nowView ? [] : [power === null ? "no power reading" : watts(power), `${count(counts.placed)} placed`, waiting(counts.pending)]),
  ].filter(Boolean).join(" · ");
}

const waiting = (pending) => `${count(pending)} wait${pending === 1 ? "s" : ""}`;

function connection(state, words) {
  const sign = byId("connection");
  if (sign.dataset.state !== state || sign.textContent !== words) sign.textContent = words;
  sign.dataset.state = state;
  document.body.toggleAttribute("data-broken", state === "broken");
}

listen(page.map, model, (cell) => {
  location.hash = `#/gpu/${encodeURIComponent(model.nodeName(cell))}/${model.index[cell]}`;
  // In a small window the panel lies below the map.
  const [main, panel] = [document.querySelector("main"), byId("panel")];
  if (panel.offsetTop > main.offsetTop) main.scrollTop = panel.offsetTop - main.offsetTop;
}, () => {
  if (view === gpuView || view === nodeView) location.hash = "#/fleet";
  view.leave?.(byId("panel"), page);
});
window.addEventListener("hashchange", route);
window.addEventListener("resize", () => scrollable(byId("panel")));
// The part after # is the view's, so that the link must not change it.
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("panel").focus();
});
route();
follow({
  whole(frame) {
    const isFirst = !model.ready;
    model.whole(frame);
    page.map.rebuild();
    glance();
    if (isFirst || !view.whole) route();
    else view.whole(byId("panel"), page);
  },
  delta(frame) {
    page.map.touch(model.delta(frame));
    glance();
    if (!isUsed(byId("panel"))) view.frame?.(byId("panel"), page, frame);
  },
  live: () => connection("live", "live"),
  broken(retryMs) {
    const since = model.atMs ? `, as of ${new Date(model.atMs).toLocaleTimeString("en-GB")}` : "";
    connection("broken", `no connection${since}; next try in ${Math.max(1, Math.round(retryMs / 1000))} s`);
  },
});
