// What decisions changed: a list, and a slider that takes the map back to how it was after each.

import { clock, count, el, gpus, moment, show, table, workloadLink } from "./dom.js";

const [SHOWN, NEWER] = [40, 4]; // rows of the list, and of these newer than the chosen one
let chosen = null; // number of a change, or null for now

export const historyView = {
  wide: false,
  open: draw,
  frame(panel, page, frame) {
    if (frame.changes) draw(panel, page);
  },
  close(page) {
    chosen = null;
    page.map.past(null);
  },
};

export function changeRow(change) {
  const [, ms, kind, id, words] = change;
  return [clock(ms), kind, id ? workloadLink(id, words || id) : words];
}

function draw(panel, page) {
  const { model } = page;
  const changes = model.changes;
  page.map.choose(-1);
  if (!changes.length) {
    show(panel, el("h2", {}, "History"), el("p", { class: "quiet" }, "Nothing was decided since the controller began to keep this list."));
    return;
  }
  const found = chosen === null ? -1 : changes.findIndex(([number]) => number === chosen);
  if (found < 0) chosen = null;
  const slider = el("input", { type: "range", min: 0, max: changes.length, value: found < 0 ? changes.length : found, id: "slider",
    oninput: () => {
      const at = Number(slider.value);
      chosen = at >= changes.length ? null : changes[at][0];
      tell();
    } });
  const told = el("div", { "aria-live": "polite" });
  const list = el("div");
  const tell = () => {
    const at = chosen === null ? -1 : changes.findIndex(([number]) => number === chosen);
    const change = changes[at];
    slider.setAttribute("aria-valuetext", change ? `${clock(change[1])}: ${change[2]} ${change[4]}` : "now");
    page.map.past(change ? model.heldAfter(at) : null, change);
    show(told, change ? describe(change, model) : el("p", {}, "Now. Move the slider to go back; the map then shows what was held after each change."));
    const newest = at < 0 ? changes.length - 1 : at + NEWER;
    const from = Math.max(0, Math.min(newest, changes.length - 1) + 1 - SHOWN);
    show(list, table([["time"], ["what"], ["of"], ["GPUs", true]], changes.slice(from, from + SHOWN).reverse().map((one) => {
      const row = [...changeRow(one), one[5].length ? difference(one) : ""];
      row.kind = one === change ? "now" : "";
      return row;
    })));
  };
  const step = (by, words) => el("button", { type: "button", onclick: () => {
    slider.value = Math.min(changes.length, Math.max(0, Number(slider.value) + by));
    slider.dispatchEvent(new Event("input"));
  } }, words);
  show(panel, el("h2", {}, "History"), el("label", { for: "slider" }, `The last ${count(changes.length)} changes, the oldest to the left`),
    slider, el("div", { class: "fields" }, step(-1, "Back"), step(1, "Forward"), step(changes.length, "Now")), told, list);
  tell();
}

function difference([, , , , , pairs]) {
  let sum = 0;
  for (let at = 1; at < pairs.length; at += 2) sum += pairs[at];
  return `${sum > 0 ? "+" : ""}${gpus(sum)}`;
}

function describe([, ms, kind, id, words, pairs], model) {
  const cells = [];
  for (let at = 0; at < pairs.length && cells.length < 12; at += 2) {
    cells.push(`${model.nodeName(pairs[at])} GPU ${model.index[pairs[at]]} ${pairs[at + 1] > 0 ? "+" : ""}${gpus(pairs[at + 1])}`);
  }
  const more = pairs.length / 2 - cells.length;
  return [
    el("p", {}, el("strong", {}, `${moment(ms)}: ${kind} `), words),
    cells.length ? el("p", {}, `${cells.join(", ")}${more > 0 ? ` and ${count(more)} more` : ""}`) : el("p", { class: "quiet" }, "No GPU changed hands."),
    id ? el("p", {}, workloadLink(id, "Why, in watts")) : null,
  ];
}
