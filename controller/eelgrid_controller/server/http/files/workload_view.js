// One workload: what was asked, where it stands, and why there: each cost in watts, beside what it beat.

import { ask, bytes, cost, count, decisionLink, el, gpuLink, gpus, moment, nodeLink, show, terms, watts, zone } from "./dom.js";
import { withCommands } from "./command.js";
import { table } from "./table.js";

const SEEN_W = 0.05; // half of the last digit that is shown
let [turn, shownId] = [0, ""];

export const workloadView = {
  wide: true,
  async open(panel, page, parts) {
    const id = (shownId = parts.join("/")); // one may hold a slash
    const mine = (turn += 1);
    try {
      const workload = await ask("workload", { id });
      if (mine !== turn) return;
      show(panel, workload ? told(workload, page) : [el("h2", {}, id), el("p", {}, "There is no such workload (any more).")]);
    } catch (error) {
      if (mine === turn) show(panel, el("p", { class: "bad" }, error.message));
    }
  },
  frame(panel, page, frame) {
    if (frame.changes?.some((change) => change[3] === shownId)) this.open(panel, page, [shownId]);
  },
  close() {
    turn += 1;
  },
};

function told(workload) {
  const share = workload.gpus ? `${workload.gpus} × ${gpus(workload.milli)}` : "none";
  return [
    el("h2", {}, `${workload.name} (${workload.id})`),
    terms([
      ["state", workload.phase + (workload.reason ? `: ${workload.reason}` : "")],
      ["kind", [workload.kind.replaceAll("_", " "), workload.promise].filter(Boolean).join(", ")],
      ["namespace", [workload.namespace, workload.user && `user ${workload.user}`, workload.queue && `queue ${workload.queue}`]
        .filter(Boolean).join(", ")],
      ["asks for", `${count(workload.replicas)} replica${workload.replicas === 1 ? "" : "s"}; of each: GPUs ${share}, `
        + `CPUs ${workload.cpu_milli / 1000}, memory ${bytes(workload.memory_bytes) ?? "none"}`],
      workload.gpu_models.length ? ["models", workload.gpu_models.join(", ")] : null,
      ["submitted", moment(workload.submitted_ms)],
      workload.placed_ms ? ["placed", moment(workload.placed_ms)] : null,
      workload.ended_ms ? ["ended", moment(workload.ended_ms)] : null,
      ["last decision", decisionLink(workload.decision)],
      workload.power_limit_w ? ["power limit", `${watts(workload.power_limit_w)} a GPU`] : null,
    ]),
    el("p", { class: "quiet" }, zone()),
    workload.remedy ? [el("h3", {}, "What would help"), el("p", {}, withCommands(workload.remedy))] : null,
    workload.placements.length ? placements(workload) : null,
    el("h3", {}, workload.phase === "pending" ? "What stands in its way" : "Why it stands there"),
    workload.explained.length
      ? workload.explained.map((one) => explained(one, workload))
      : el("p", { class: "quiet" }, "Nothing was kept of what was weighed."),
  ];
}

function placements(workload) {
  const left = workload.placements_in_all - workload.placements.length;
  return [
    el("h3", {}, "Where it runs"),
    table("placements", [["replica", true], ["GPUs"], ["slice"], ["state"]], workload.placements.map((one) => [
      one.replica,
      one.gpus.length ? one.gpus.map((index, at) => [at ? ", " : "", gpuLink(one.node, index)]) : nodeLink(one.node),
      one.slice || "-", one.lost ? el("span", { class: "bad" }, "on a lost GPU") : "ready"])),
    left > 0 ? el("p", { class: "quiet" }, `and ${count(left)} more replicas`) : null,
  ];
}

function explained(replica, workload) {
  const names = [...new Set(replica.candidates.flatMap((one) => one.terms.map(([name]) => name)))];
  const best = replica.candidates[0]?.cost_w;
  const isPlaced = workload.phase !== "pending";
  const rows = replica.candidates.map((one, at) => {
    const found = Object.fromEntries(one.terms);
    const row = [
      [nodeLink(one.node), `${one.gpus.length ? ` GPU ${one.gpus.join(", ")}` : ""}${at === 0 && isPlaced ? " (chosen)" : ""}`],
      ...names.map((name) => (name in found ? cost(found[name]) : null)),
      cost(one.cost_w), at === 0 ? "" : one.cost_w - best < SEEN_W ? "equal" : `+${cost(one.cost_w - best)}`,
    ];
    row.kind = at === 0 && isPlaced ? "chosen" : "";
    return row;
  });
  const removed = replica.removals.map(([constraint, nodes]) => `${count(nodes)} by ${constraint}`).join(", ");
  return [
    el("p", {}, `Replica ${replica.replica}: ${count(replica.feasible_nodes)} node${replica.feasible_nodes === 1 ? "" : "s"} could take it`
      + `${removed ? `; ruled out: ${removed}` : ""}. Costs in watts, the lowest first:`),
    rows.length ? table(`candidates-${replica.replica}`, [["place"], ...names.map((name) => [name.replaceAll("_", " "), true]), ["in all", true], ["worse by", true]], rows, { search: false }) : null,
  ];
}
