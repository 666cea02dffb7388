// One GPU: what it is, what it reads, who holds it.

import { ask, bytes, el, gpus, isUsed, nodeLink, percent, refresh, show, terms, watts, workloadLink } from "./dom.js";
import { table } from "./table.js";
import { gpuUnit } from "./units.js";

const EVERY_MS = 2_000;
let [timer, turn] = [0, 0];

export const gpuView = {
  wide: false,
  async open(panel, page, parts) {
    const [node, index] = [parts.slice(0, -1).join("/"), parts.at(-1)]; // a name may hold a slash
    const mine = (turn += 1);
    const cell = page.model.cellOf(node, Number(index));
    page.map.choose(cell);
    let shown = false;
    const look = async () => {
      try {
        const gpu = await ask("gpu", { node, index });
        if (mine !== turn) return;
        if (!shown || !isUsed(panel)) (shown ? refresh : show)(panel, gpu ? told(gpu, page.model, cell) : missing(node, index));
        shown = true;
      } catch (error) {
        if (mine === turn && !shown) show(panel, el("p", { class: "bad" }, error.message));
      }
      if (mine === turn) timer = setTimeout(look, EVERY_MS);
    };
    await look();
  },
  close() {
    clearTimeout(timer);
    turn += 1;
  },
};

const missing = (node, index) => [el("h2", {}, `${node} GPU ${index}`), el("p", {}, "There is no such GPU (any more).")];

function told(gpu, model, cell) {
  const age = gpu.age_s == null ? "no sample came yet" : `${gpu.age_s.toFixed(0)} s old`;
  const state = gpu.node_state === "lost" ? "its node is lost" : gpu.lost ? "lost" : gpu.cordon ? `cordoned: ${gpu.cordon}` : "ready";
  const limit = gpu.limit_default_w ? `of ${watts(gpu.limit_default_w)} (${watts(gpu.limit_min_w)} to ${watts(gpu.limit_max_w)} can be set)` : "";
  return [
    el("h2", {}, `${gpu.node} GPU ${gpu.index}`),
    terms([
      ["state", el("span", { class: state === "ready" ? "" : "bad" }, state)],
      ["node", nodeLink(gpu.node)],
      ["model", `${gpu.model} (${gpu.product})`],
      ["power", `${watts(gpu.power_w)} ${limit}`],
      ["held by work", `${gpus(gpu.held_milli)} of a GPU`],
      ["utilization", percent(gpu.utilization)],
      ["memory", gpu.memory_used_bytes == null ? bytes(gpu.memory_bytes)
        : `${bytes(gpu.memory_used_bytes) ?? "0"} of ${bytes(gpu.memory_bytes) ?? "?"}`],
      ["temperature", gpu.temperature_c == null ? null : `${gpu.temperature_c.toFixed(0)} °C`],
      ["sample", age],
      gpu.topology.length ? ["place", gpu.topology.join(" / ")] : null,
      gpu.pool ? ["pool", gpu.pool] : null,
      ["UUID", el("code", {}, gpu.uuid)],
    ]),
    gpu.mig || gpu.planner_keeps ? slices(gpu, model.slices.get(cell) ?? []) : null,
    el("h3", {}, "Work on it"),
    gpu.holders.length
      ? table("holders", [["workload"], ["replica", true], ["share", gpuUnit], ["slice"]], gpu.holders.map((one) => [
        workloadLink(one.workload_id, one.name), one.replica, one.milli, one.slice || "-"]))
      : el("p", { class: "quiet" }, "None that was placed here."),
  ];
}

function slices(gpu, cut) {
  const isHeld = (one) => cut.some(([start, , profile, held]) => held && start === one.start && profile === one.profile);
  return [
    el("h3", {}, "MIG slices"),
    gpu.slices.length
      ? table("slices", [["profile"], ["memory slices"], ["held"]], gpu.slices.map((one) => [
        one.profile, one.size > 1 ? `${one.start} to ${one.start + one.size - 1}` : one.start, isHeld(one) ? "yes" : "no"]))
      : el("p", { class: "quiet" }, "None is there."),
    gpu.wanted.length ? el("p", {}, `Wanted: ${gpu.wanted.map((one) => `${one.profile} at ${one.start}`).join(", ")}`) : null,
  ];
}
