// What decisions changed: a list, and a slider that takes the map back to how it was after each.
// A decision has the number of its entry in the journal, so that #decision/NUMBER is the same in every run.

import { ask, clock, count, decisionLink, el, gpus, moment, show, workloadLink, zone } from "./dom.js";
import { table } from "./table.js";

const [SHOWN, NEWER] = [40, 4]; // rows of the list, and of these newer than the chosen one
let chosen = null; // {number, id} of a change, or null for now
let asked = null; // what is being read of the journal, or why it could not be
const REST_MS = 120;
let [addressed, listing, turn] = [0, 0, 0];

export const historyView = {
  wide: false,
  open(panel, page, [number]) {
    turn += 1;
    chosen = number ? { number: Number(number) } : null;
    asked = null;
    page.map.choose(-1);
    draw(panel, page);
    // After a start there is nothing yet but what the journal tells.
    if (!page.model.changes.length && page.model.hasEarlier && !chosen) older(panel, page);
    else seek(panel, page);
  },
  frame(panel, page, frame) {
    if (frame.changes) draw(panel, page);
  },
  close(page) {
    turn += 1;
    chosen = null;
    clearTimeout(addressed);
    clearTimeout(listing);
    page.map.past(null);
  },
};

export function changeRow(change) {
  const [number, ms, kind, id, words] = change;
  return [decisionLink(number, moment(ms) ?? `${number}`), kind, id ? workloadLink(id, words || id) : words];
}

function place(changes) {
  if (!chosen) return -1;
  for (let at = changes.length - 1; at >= 0; at -= 1) {
    if (changes[at][0] === chosen.number && (chosen.id === undefined || changes[at][3] === chosen.id)) return at;
  }
  return -1;
}

/** Reads the journal as far back as the chosen decision. */
async function seek(panel, page) {
  const { model } = page;
  const mine = turn;
  while (mine === turn && asked === null && chosen && chosen.number < model.from && model.hasEarlier) await older(panel, page);
}

async function older(panel, page) {
  const { model } = page;
  const mine = turn;
  asked = "Reading the journal.";
  draw(panel, page);
  try {
    const answer = await ask("past", { before: model.from });
    if (mine !== turn) return;
    model.earlier(answer);
    asked = null;
  } catch (error) {
    if (mine !== turn) return;
    asked = error.message;
  }
  draw(panel, page);
}

function draw(panel, page) {
  const { model } = page;
  const changes = model.changes;
  const slider = el("input", { type: "range", min: 0, max: changes.length, id: "slider", oninput: () => {
    const change = changes[Number(slider.value)];
    chosen = change ? { number: change[0], id: change[3] } : null;
    tell();
    clearTimeout(addressed); // browsers take a few hundred addresses a minute
    addressed = setTimeout(() => history.replaceState(null, "", change ? `#/decision/${change[0]}` : "#/history"), 2 * REST_MS);
  } });
  const told = el("div", { "aria-live": "polite" });
  const list = el("div");
  const tell = () => {
    const at = place(changes);
    const change = changes[at];
    slider.value = at < 0 ? changes.length : at;
    slider.setAttribute("aria-valuetext", change ? `${clock(change[1])}: ${change[2]} ${change[4]}` : "now");
    page.map.past(change ? model.heldAfter(at) : null, change);
    show(told, change ? describe(change, model) : noneChosen(model));
    // While the slider moves the map is what is looked at.
    clearTimeout(listing);
    if (list.hasChildNodes()) listing = setTimeout(() => show(list, rows(changes, at)), REST_MS);
    else show(list, rows(changes, at));
  };
  const step = (by, words) => el("button", { type: "button", id: words.toLowerCase(), onclick: () => {
    slider.value = Math.min(changes.length, Math.max(0, Number(slider.value) + by));
    slider.dispatchEvent(new Event("input"));
  } }, words);
  show(panel, el("h2", {}, "History"),
    changes.length ? [
      el("label", { for: "slider" }, `The last ${count(changes.length)} changes, the oldest to the left`), slider,
      el("div", { class: "fields" }, step(-1, "Back"), step(1, "Forward"), step(changes.length, "Now")),
    ] : el("p", { class: "quiet" }, "Nothing was decided since this list began."),
    told, list, past(panel, page));
  tell();
}

function noneChosen(model) {
  if (chosen) return el("p", { class: "bad" }, `Decision ${chosen.number} is not at hand: the list begins with ${count(model.from)}`
    + `${model.hasEarlier ? "." : ", and the journal tells of nothing before."}`);
  if (!model.changes.length) return null;
  return el("p", {}, "Now. Move the slider to go back; the map then shows what was held after each change. ", zone());
}

function past(panel, page) {
  if (asked) return el("p", { class: "quiet", role: "status" }, asked);
  if (page.model.hasEarlier) return el("p", {}, el("button", { type: "button", id: "earlier", onclick: () => older(panel, page) }, "Earlier, from the journal"));
  return el("p", { class: "quiet" }, "The journal tells of nothing before.");
}

function rows(changes, at) {
  if (!changes.length) return null;
  const newest = at < 0 ? changes.length - 1 : at + NEWER;
  const from = Math.max(0, Math.min(newest, changes.length - 1) + 1 - SHOWN);
  return table("changes", [["time"], ["what"], ["of"], ["GPUs", true]], changes.slice(from, from + SHOWN).reverse().map((one) => {
    const row = [...changeRow(one), one[5].length ? difference(one) : ""];
    row.kind = one === changes[at] ? "now" : "";
    return row;
  }), { search: false });
}

function difference([, , , , , pairs]) {
  let sum = 0;
  for (let at = 1; at < pairs.length; at += 2) sum += pairs[at];
  return `${sum > 0 ? "+" : ""}${gpus(sum)}`;
}

function describe([number, ms, kind, id, words, pairs], model) {
  const cells = [];
  for (let at = 0; at < pairs.length && cells.length < 12; at += 2) {
    cells.push(`${model.nodeName(pairs[at])} GPU ${model.index[pairs[at]]} ${pairs[at + 1] > 0 ? "+" : ""}${gpus(pairs[at + 1])}`);
  }
  const more = pairs.length / 2 - cells.length;
  return [
    el("p", {}, el("strong", {}, `${moment(ms)}: ${kind} `), words, el("span", { class: "quiet" }, ` (decision ${number})`)),
    cells.length ? el("p", {}, `${cells.join(", ")}${more > 0 ? ` and ${count(more)} more` : ""}`) : el("p", { class: "quiet" }, "No GPU changed hands."),
    id ? el("p", {}, workloadLink(id, "Why, in watts")) : null,
  ];
}
