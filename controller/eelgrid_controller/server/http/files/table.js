// Tables: sorted by a click on a heading, filtered by a text, and on small screens a card for each row.

import { byId, el, scrollable } from "./dom.js";

const FILTERED_FROM = 10; // rows, from which there is a field to filter them
const NEXT = { none: "first", first: "second", second: "none" }; // of a heading's clicks
const kept = new Map(); // by a table's name: how it is sorted and filtered, and what it was drawn of

const told = (cell) => [cell].flat(3).map((part) => (part == null || part === false ? "" : part.textContent ?? String(part))).join("");
/** Whether a cell may be broken anywhere: names have no bound, and must not push others out of sight. */
const isLong = (text) => text.length > 24;
/** Of what is longer than three lines the beginning; what it leads to has all of it. */
const cut = (cell, text) => (text.length > 100 ? el("span", { class: "cut", title: text }, cell) : cell);

/** A cell that is sorted by something else than what it shows. */
export const by = (key, shown) => ({ key, shown });
const shownOf = (cell) => (cell?.shown === undefined ? cell : cell.shown);
const keyOf = (cell) => (cell?.shown === undefined ? cell : cell.key);

/**
 * columns: [title, kind]: a number where there is a kind; a function of all numbers of the column gives what writes one.
 * Each row has its cells, and may have `row.kind`, its class. A click on a row of the class "acts" presses its first button.
 * name: of the table on the page, under which its order is kept; search: whether it has a field of its own.
 */
export function table(name, columns, rows, { search = true } = {}) {
  const state = kept.get(name) ?? { at: -1, turn: "none", text: "" };
  kept.set(name, Object.assign(state, { columns, rows, search }));
  const hasField = search && (rows.length >= FILTERED_FROM || state.text);
  const filter = hasField ? el("p", { class: "filter" },
    el("label", { for: `filter-${name}` }, "Filter"),
    el("input", { type: "search", id: `filter-${name}`, "data-filter": name, value: state.text, autocomplete: "off" }),
    el("span", { class: "quiet", role: "status" }, matched(state))) : null;
  return el("div", { class: "table", "data-table": name }, filter, el("div", { class: "scroll" }, build(state)));
}

const matches = (row, text) => row.some((cell) => told(shownOf(cell)).toLowerCase().includes(text));
const found = ({ rows, text }) => (text ? rows.filter((row) => matches(row, text.trim().toLowerCase())) : rows);
const matched = (state) => (state.text ? `${found(state).length} of ${state.rows.length}` : "");

function ordered(state) {
  const rows = found(state);
  const { at, turn, columns } = state;
  if (turn === "none" || at >= columns.length) return rows;
  const isNumber = Boolean(columns[at][1]);
  const key = (row) => {
    const value = keyOf(row[at]);
    if (!isNumber) return told(shownOf(value));
    if (typeof value === "number") return value;
    const number = Number.parseFloat(told(value).replaceAll(",", ""));
    return Number.isNaN(number) ? null : number;
  };
  const { compare } = new Intl.Collator("en", { numeric: true });
  const way = isDescending(state) ? -1 : 1;
  // What is not known is last, however it is sorted.
  return rows.map((row) => [key(row), row]).sort(([one], [other]) => (one === null || other === null
    ? (one === null) - (other === null) : way * (isNumber ? one - other : compare(one, other)))).map(([, row]) => row);
}

/** Numbers begin with the largest, names with the first. */
const isDescending = ({ at, turn, columns }) => Boolean(columns[at][1]) === (turn === "first");

function build(state) {
  const { columns, at, turn } = state;
  const writers = columns.map(([, kind], place) => (typeof kind === "function"
    ? kind(state.rows.map((row) => keyOf(row[place])).filter((value) => typeof value === "number")) : null));
  const head = el("tr", {}, columns.map(([title, kind], place) => {
    const isSorted = turn !== "none" && place === at;
    const sign = isSorted ? (isDescending(state) ? "▼" : "▲") : "";
    return el("th", { class: kind && "n", scope: "col", "aria-sort": isSorted && (isDescending(state) ? "descending" : "ascending") },
      title ? el("button", { type: "button", class: "sort", "data-sort": place }, title, el("span", { class: "arrow", "aria-hidden": "true" }, sign)) : null);
  }));
  const body = ordered(state).map((row) => el("tr", { class: row.kind }, row.map((cell, place) => {
    const raw = shownOf(cell) ?? "-";
    const shown = writers[place] && typeof raw === "number" ? writers[place](raw) : raw;
    const text = told(shown);
    return el("td", { class: columns[place][1] ? "n" : isLong(text) && "long", "data-label": columns[place][0] }, cut(shown, text));
  })));
  if (!body.length) body.push(el("tr", {}, el("td", { class: "quiet", colspan: columns.length }, state.text ? `No row has “${state.text}”.` : "None")));
  return el("table", {}, el("thead", {}, head), el("tbody", {}, body));
}

/** Draws a table again, of the same rows. */
function redraw(box) {
  const state = kept.get(box.dataset.table);
  box.querySelector(".scroll").replaceChildren(build(state));
  const status = box.querySelector("[role=status]");
  if (status) status.textContent = matched(state);
  scrollable(box);
}

document.addEventListener("click", (event) => {
  const heading = event.target.closest?.("[data-sort]");
  if (heading) {
    const box = heading.closest("[data-table]");
    const state = kept.get(box.dataset.table);
    const at = Number(heading.dataset.sort);
    Object.assign(state, { at, turn: state.at === at ? NEXT[state.turn] : "first" });
    redraw(box);
    box.querySelector(`[data-sort="${at}"]`).focus();
    const said = state.turn === "none" ? "not sorted" : `sorted by ${state.columns[at][0]}, ${isDescending(state) ? "descending" : "ascending"}`;
    byId("said").textContent = said;
    return;
  }
  const row = event.target.closest?.(".acts");
  if (row && !event.target.closest("a, button, input, code") && !String(getSelection())) row.querySelector("button.pick")?.click();
});
document.addEventListener("input", (event) => {
  const name = event.target.dataset?.filter;
  if (!name) return;
  kept.get(name).text = event.target.value;
  redraw(event.target.closest("[data-table]"));
});
