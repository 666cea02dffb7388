// What services and jobs were promised, and how that is kept: latency by service, time and watts by job.

import { ask, count, el, isUsed, refresh, show, workloadLink } from "./dom.js";
import { command } from "./command.js";
import { by, table } from "./table.js";
import { latencyUnit, powerUnit } from "./units.js";

const EVERY_MS = 5_000; // promises are looked at as often
let [timer, turn] = [0, 0];

export const promisesView = {
  wide: true,
  async open(panel) {
    const mine = (turn += 1);
    let shown = false;
    const look = async () => {
      try {
        const found = await ask("promises", {});
        if (mine !== turn) return;
        if (!shown || !isUsed(panel)) (shown ? refresh : show)(panel, told(found));
        shown = true;
      } catch (error) {
        if (mine === turn && !shown) show(panel, el("h2", {}, "Promises"), el("p", { class: "bad" }, error.message));
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

const signed = (ratio) => (ratio == null ? null : `${ratio > 0 ? "+" : ""}${(100 * ratio).toFixed(1)} %`);
const why = (one) => (one.is_advice ? "would: " : "") + one.reason;

function told({ services, jobs, left_out: leftOut }) {
  if (!services.length && !jobs.length) {
    return [el("h2", {}, "Nothing is promised"),
      el("p", { class: "quiet" }, "Objectives of services and slowdowns of jobs are in their YAML. How to submit one: ",
        command("eelctl submit --help"))];
  }
  const promised = services.filter((one) => one.objective_s);
  const heard = promised.filter((one) => one.live_s != null);
  const late = heard.filter((one) => one.live_s > one.objective_s).length;
  const parts = [[late, "late"], [promised.length - heard.length, "not measured"], [services.length - promised.length, "by load"]];
  return [
    el("h2", {}, "Promises"),
    services.length > 0 && [
      el("h3", {}, [`Services: ${heard.length - late} of ${promised.length} kept`, ...parts.filter(([n]) => n).map((one) => one.join(" "))].join(", ")),
      table("services", [["service"], ["kept"], ["latency", latencyUnit], ["promised", latencyUnit], ["requests, 1/s", true], ["replicas", true], ["phase"], ["why"]],
        services.map((one) => [
          workloadLink(one.id, one.name || one.id), kept(one), one.live_s, one.objective_s || null,
          one.arrived_hz == null ? null : count(Number(one.arrived_hz.toPrecision(4))), `${one.serving} of ${one.wanted}`, one.phase, why(one)])),
    ],
    jobs.length > 0 && [
      el("h3", {}, "Jobs"),
      table("jobs", [["job"], ["power limit", powerUnit], ["time", true], ["saves", true], ["phase"], ["why"]], jobs.map((one) => [
        workloadLink(one.id, one.name || one.id), one.limit_w ?? "default", by(one.slowdown ?? null, signed(one.slowdown) ?? "-"),
        by(one.saving ?? null, signed(one.saving) ?? "-"), one.phase, why(one)])),
      el("p", { class: "quiet" }, "Time and energy saved are against the largest limit, for the same work."),
    ],
    leftOut ? el("p", { class: "quiet" }, `and ${leftOut} more: `, command("eelctl promises")) : null,
  ];
}

function kept(one) {
  if (!one.objective_s) return "by load";
  if (one.live_s == null) return "not measured";
  return one.live_s <= one.objective_s ? "yes" : el("span", { class: "bad" }, "late");
}
