// What waits, in the order in which it is tried, and for which reason.

import { count, el, gpus, refresh, show, since, workloadLink } from "./dom.js";
import { by, table } from "./table.js";

export const queueView = {
  wide: true,
  open: (panel, page) => draw(panel, page, show),
  frame(panel, page, frame) {
    if (frame.queue || frame.frame % 5 === 0) draw(panel, page, refresh); // how long it waits rises by itself
  },
};

function draw(panel, { model }, put) {
  const { rows, reasons } = model.queue;
  const pending = model.counts.pending;
  put(panel,
    el("h2", {}, pending ? `${count(pending)} wait${pending === 1 ? "s" : ""}` : "Nothing waits"),
    reasons.length ? [
      el("h3", {}, "Reasons"),
      table("reasons", [["reason"], ["workloads", true]], reasons.map(([reason, waiting]) => [reason || "not tried yet", count(waiting)])),
      el("h3", {}, "In order"),
      table("queue", [["workload"], ["name"], ["namespace"], ["priority", true], ["replicas", true], ["GPUs", true], ["waits", true], ["reason"]],
        rows.map(([id, name, namespace, priority, replicas, wanted, milli, submittedMs, reason]) => [
          workloadLink(id), name, namespace, priority, count(replicas), by(wanted * milli, wanted ? `${wanted} × ${gpus(milli)}` : "0"),
          by(model.atMs - submittedMs, since(submittedMs, model.atMs)), reason])),
      pending > rows.length ? el("p", { class: "quiet" }, `and ${count(pending - rows.length)} more`) : null,
    ] : el("p", { class: "quiet" }, "All work that was submitted has its place, or has ended: see ", el("a", { href: "#/workloads" }, "Workloads"), "."));
}
