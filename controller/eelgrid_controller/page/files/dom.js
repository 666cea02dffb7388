// Elements and quantities as people read them. Texts are always text: nothing here is parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  for (const child of children.flat(3)) if (child != null && child !== false) element.append(child);
  return element;
}

export const el = (tag, attributes, ...children) => filled(document.createElement(tag), attributes, children);
export const svg = (tag, attributes, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);
export const byId = (id) => document.getElementById(id);

export function show(panel, ...children) {
  panel.replaceChildren(...children.flat(3).filter((child) => child != null && child !== false));
}

/** Whether somebody is at a link or a field of it: drawing it anew would take that away from under their hands. */
export const isUsed = (panel) => panel !== document.activeElement && panel.contains(document.activeElement);

/** Rows of [term, description]; a missing description is a dash, never a number. */
export function terms(rows) {
  return el("dl", {}, rows.filter(Boolean).map(([term, told]) => [el("dt", {}, term), el("dd", {}, told ?? "-")]));
}

/** Whether a cell may be broken anywhere: names have no bound, and must not push others out of sight. */
const isLong = (cell) => (cell?.textContent ?? String(cell)).length > 24;

/** columns: [title, isNumber]; each row has its cells, and may have a class as `row.kind`. */
export function table(columns, rows) {
  const head = el("tr", {}, columns.map(([title, isNumber]) => el("th", { class: isNumber && "n", scope: "col" }, title)));
  const body = rows.map((row) => el("tr", { class: row.kind },
    row.map((cell, at) => el("td", { class: columns[at][1] ? "n" : isLong(cell) && "long" }, cell ?? "-"))));
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, body)));
}

export function watts(powerW) {
  if (powerW == null || powerW < 0) return "-";
  if (powerW >= 1e6) return `${(powerW / 1e6).toFixed(2)} MW`;
  if (powerW >= 1e4) return `${(powerW / 1e3).toFixed(1)} kW`;
  return `${Math.round(powerW)} W`;
}

/** A cost, which may be small or below nothing. */
export const cost = (costW) => `${costW.toFixed(Math.abs(costW) < 100 ? 1 : 0)} W`;
export const gpus = (milli) => (Math.round(milli) / 1000).toLocaleString("en");
export const count = (number) => number.toLocaleString("en");
export const percent = (ratio) => (ratio == null ? null : `${(100 * ratio).toFixed(0)} %`);

export function bytes(amount) {
  if (amount == null || amount === 0) return null;
  return amount >= 2 ** 30 ? `${(amount / 2 ** 30).toFixed(1)} GiB` : `${(amount / 2 ** 20).toFixed(0)} MiB`;
}

export function clock(ms) {
  return ms ? new Date(ms).toLocaleTimeString("en-GB") : null;
}

export function moment(ms) {
  if (!ms) return null;
  const at = new Date(ms);
  const day = at.toDateString() === new Date().toDateString() ? "" : `${at.toISOString().slice(0, 10)} `;
  return day + clock(ms);
}

export function since(ms, nowMs) {
  const seconds = Math.max(0, Math.round((nowMs - ms) / 1000));
  if (seconds < 120) return `${seconds} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
}

export const workloadLink = (id, text) => el("a", { href: `#/workload/${encodeURIComponent(id)}` }, text ?? id);
export const gpuLink = (node, index, text) =>
  el("a", { href: `#/gpu/${encodeURIComponent(node)}/${index}` }, text ?? `${node} GPU ${index}`);

export const decisionLink = (number, text) => el("a", { href: `#/decision/${number}` }, text ?? `${number}`);

/** What the controller answers; null where the thing is not there. Raises Error with words for people. */
export async function ask(what, given) {
  const response = await fetch(`data/${what}?${new URLSearchParams(given)}`);
  if (response.status === 404) return null;
  if (!response.ok) throw new Error((await response.text()).slice(0, 200) || `the controller said ${response.status}`);
  return response.json();
}
