// Workloads that wait or run, by a text in their id, name or namespace.

import { ask, count, el, gpus, show, table, workloadLink } from "./dom.js";

let [text, timer, turn] = ["", 0, 0];

export const searchView = {
  wide: true,
  open(panel) {
    const list = el("div", { "aria-live": "polite" });
    const field = el("input", { type: "search", id: "search", value: text, placeholder: "id, name or namespace",
      oninput: () => {
        text = field.value;
        clearTimeout(timer);
        timer = setTimeout(() => find(list), 250);
      } });
    show(panel, el("h2", {}, "Workloads"), el("div", { class: "fields" }, el("label", { for: "search" }, "Find"), field), list);
    find(list);
  },
  close() {
    clearTimeout(timer);
    turn += 1;
  },
};

async function find(list) {
  const mine = (turn += 1);
  try {
    const found = await ask("search", { text });
    if (mine !== turn) return;
    show(list,
      found.rows.length ? null : el("p", { class: "quiet" }, "None."),
      table([["workload"], ["name"], ["namespace"], ["kind"], ["state"], ["replicas", true], ["GPUs", true], ["reason"]],
        found.rows.map((one) => [workloadLink(one.id), one.name, one.namespace, one.kind.replaceAll("_", " "), one.phase,
          count(one.replicas), one.gpus ? `${one.gpus} × ${gpus(one.milli)}` : "0", one.reason])),
      found.left_out ? el("p", { class: "quiet" }, `The newest ${found.rows.length}; write more to find others.`) : null);
  } catch (error) {
    if (mine === turn) show(list, el("p", { class: "bad" }, error.message));
  }
}
