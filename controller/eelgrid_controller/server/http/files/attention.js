// What needs attention: how urgent it is, what it is about, since when, and the command that helps.

import { count, el, gpuLink, many, nodeLink, since, workloadLink } from "./dom.js";
import { command } from "./command.js";

const OF_WORKLOADS = new Set(["broken_promise", "uncontrolled_promise", "held_but_idle"]);

/** Of an item: {node}, {node, index} or {workload}; {} of what has no place of its own. */
export function placeOf({ kind, subject }, model) {
  if (OF_WORKLOADS.has(kind)) return { workload: subject };
  if (model.nodeByName?.has(subject)) return { node: subject };
  const at = subject.lastIndexOf("/");
  const [node, index] = [subject.slice(0, at), subject.slice(at + 1)];
  if (at > 0 && /^\d+$/.test(index) && model.nodeByName?.has(node)) return { node, index };
  return {};
}

const VIEWS = { budget_over: "power", budget_short: "power", long_wait: "queue" };

function subjectLink(item, place) {
  if (place.workload) return workloadLink(place.workload);
  if (place.index !== undefined) return gpuLink(place.node, place.index);
  if (place.node) return nodeLink(place.node);
  const view = VIEWS[item.kind];
  return view ? el("a", { href: `#/${view}` }, item.subject) : item.subject;
}

/** pick(event): somebody wants to see on the map what event.currentTarget.dataset says; isChosen(place): it is seen there. */
export function attentionList({ attention, attention_in_all: inAll, at_ms: atMs }, model, pick, isChosen) {
  if (!attention.length) return el("p", { class: "calm" }, "Nothing needs attention.");
  const more = inAll - attention.length;
  return [
    el("ol", { class: "attention" }, attention.map((item) => {
      const place = placeOf(item, model);
      const hasPlace = Boolean(place.node ?? place.workload);
      return el("li", { class: hasPlace ? `${item.severity} acts` : item.severity },
        el("span", { class: "severity" }, item.severity),
        el("div", {},
          el("p", { class: "message" }, el("strong", {}, subjectLink(item, place)), " ", item.message),
          el("p", { class: "about" },
            item.since_ms && el("span", { class: "quiet" }, `for ${since(item.since_ms, atMs)}`),
            hasPlace && el("button", { type: "button", class: "pick", "data-node": place.node, "data-index": place.index,
              "data-workload": place.workload, "aria-pressed": String(isChosen(place)), onclick: pick,
              "aria-label": `On the map: ${item.subject}` }, "On the map"),
            item.command && command(item.command))));
    })),
    more > 0 ? el("p", { class: "quiet" }, `and ${many(more, "less urgent item")}; `, command("eelctl overview -o wide")) : null,
  ];
}

export const attentionTitle = ({ attention_in_all: inAll }) => (inAll ? `Needs attention (${count(inAll)})` : "Needs attention");
