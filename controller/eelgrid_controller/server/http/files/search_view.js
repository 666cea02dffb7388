// Workloads that wait or run, by a text in their id, name or namespace; and nodes by their name.

import { ask, count, el, gpus, many, nodeLink, show, workloadLink } from "./dom.js";
import { by, table } from "./table.js";

const NODES_MOST = 20;
let [text, timer, turn] = ["", 0, 0];

export const searchView = {
  wide: true,
  open(panel, { model }) {
    const [list, found] = [el("div"), el("p", { class: "quiet", role: "status" })];
    const field = el("input", { type: "search", id: "search", value: text, placeholder: "id, name, namespace or node",
      oninput: () => {
        text = field.value;
        clearTimeout(timer);
        timer = setTimeout(() => find(list, found, model), 250);
      } });
    show(panel, el("h2", {}, "Workloads"), el("div", { class: "fields" }, el("label", { for: "search" }, "Find"), field), found, list);
    find(list, found, model);
  },
  close() {
    clearTimeout(timer);
    turn += 1;
  },
};

async function find(list, status, model) {
  const mine = (turn += 1);
  try {
    const found = await ask("search", { text });
    if (mine !== turn) return;
    show(list,
      nodes(model),
      table("workloads", [["workload"], ["name"], ["namespace"], ["kind"], ["state"], ["replicas", true], ["GPUs", true], ["reason"]],
        found.rows.map((one) => [workloadLink(one.id), one.name, one.namespace, one.kind.replaceAll("_", " "), one.phase,
          count(one.replicas), one.gpus ? `${one.gpus} × ${gpus(one.milli)}` : "0", one.reason])));
    status.textContent = found.left_out ? `The newest ${count(found.rows.length)} workloads; write more to find others.`
      : found.rows.length ? many(found.rows.length, "workload") : "No workload.";
  } catch (error) {
    if (mine !== turn) return;
    status.textContent = "";
    show(list, el("p", { class: "bad" }, error.message));
  }
}

/** Nodes that have the text in their name. */
function nodes(model) {
  const wanted = text.trim().toLowerCase();
  const names = wanted ? model.nodes.name.filter((name) => name.toLowerCase().includes(wanted)) : [];
  if (!names.length) return null;
  const more = names.length - NODES_MOST;
  return el("p", {}, "Nodes: ", names.slice(0, NODES_MOST).map((name, at) => [at ? ", " : "", nodeLink(name)]), more > 0 ? ` and ${count(more)} more` : "");
}
