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

const solid = (children) => children.flat(3).filter((child) => child != null && child !== false);

/** Another view, or one whose fields know other things. Who was at a field stays there, who followed a link is at its end. */
export function show(panel, ...children) {
  const at = document.activeElement;
  const isHere = at !== panel && panel.contains(at);
  panel.replaceChildren(...solid(children));
  scrollable(panel);
  if (isHere) ((at.id && byId(at.id)) || panel).focus({ preventScroll: true });
}

/**
 * The same view with newer words: what did not change stays the element that it is, so that where somebody
 * scrolled, selected or listens is not lost. Listeners of replaced elements stay too, so they may not close over what changes.
 */
export function refresh(panel, ...children) {
  patch(panel, el("div", {}, ...solid(children)));
  scrollable(panel);
}

function patch(old, now) {
  const [olds, news] = [[...old.childNodes], [...now.childNodes]]; // those of `now` move to the page
  news.forEach((next, at) => {
    const last = olds[at];
    if (!last) old.append(next);
    else if (last.nodeName !== next.nodeName) last.replaceWith(next);
    else if (last.nodeType === Node.TEXT_NODE) {
      if (last.data !== next.data) last.data = next.data;
    } else {
      attributes(last, next);
      patch(last, next);
    }
  });
  olds.slice(news.length).forEach((one) => one.remove());
}

function attributes(old, now) {
  for (const { name } of [...old.attributes]) if (!now.hasAttribute(name) && !(name in SIDEWAYS)) old.removeAttribute(name);
  for (const { name, value } of now.attributes) {
    if (old.getAttribute(name) === value) continue;
    if (name === "style") old.style.cssText = value; // as an attribute the content security policy refuses it
    else old.setAttribute(name, value);
  }
}

// What scrolls sideways must be reached by keys, too (WCAG 2.1.1).
const SIDEWAYS = { tabindex: "0", role: "group", "aria-label": "scrolls sideways" };
export function scrollable(panel) {
  for (const box of panel.querySelectorAll(".scroll")) {
    const isWide = box.scrollWidth > box.clientWidth;
    for (const [name, value] of Object.entries(SIDEWAYS)) {
      if (isWide) box.setAttribute(name, value);
      else box.removeAttribute(name);
    }
  }
}

/**
 * Whether keys are at a link or a field of it: what that leads to must not change under somebody's hands. What sorts or
 * filters a table stays the same whatever the table says, and a button that was clicked is left behind.
 */
export const isUsed = (panel) => panel.contains(document.activeElement)
  && document.activeElement.matches(":is(a, button, input, select):focus-visible:not([data-sort], [data-filter])");

/** Rows of [term, description]; a missing description is a dash, never a number. */
export function terms(rows) {
  return el("dl", {}, rows.filter(Boolean).map(([term, told]) => [el("dt", {}, term), el("dd", {}, told ?? "-")]));
}

export function watts(powerW) {
  if (powerW == null || powerW < 0) return "-";
  if (powerW >= 1e6) return `${(powerW / 1e6).toFixed(2)} MW`;
  if (powerW >= 1e4) return `${(powerW / 1e3).toFixed(1)} kW`;
  return `${count(Math.round(powerW))} W`;
}

/** A cost, which may be small or below nothing. */
export const cost = (costW) => `${costW.toFixed(Math.abs(costW) < 100 ? 1 : 0).replace(/^-(?=0\.0$)/, "")} W`;
export const gpus = (milli) => (Math.round(milli) / 1000).toLocaleString("en");
export const count = (number) => number.toLocaleString("en");
export const many = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
export const percent = (ratio) => (ratio == null ? null : `${(100 * ratio).toFixed(0)} %`);

export function bytes(amount) {
  if (amount == null || amount === 0) return null;
  const unit = amount >= 2 ** 40 ? 40 : amount >= 2 ** 30 ? 30 : 20;
  return `${(amount / 2 ** unit).toFixed(unit === 20 ? 0 : 1)} ${{ 20: "MiB", 30: "GiB", 40: "TiB" }[unit]}`;
}

export function clock(ms) {
  return ms ? new Date(ms).toLocaleTimeString("en-GB") : null;
}

export function moment(ms) {
  if (!ms) return null;
  const at = new Date(ms);
  const day = at.toDateString() === new Date().toDateString() ? "" : `${at.toLocaleDateString("sv-SE")} `;
  return day + clock(ms);
}

/** Of which clock the times on the page are: the reader's. */
export const zone = () => `Times are of ${Intl.DateTimeFormat().resolvedOptions().timeZone}.`;

export function since(ms, nowMs) {
  const seconds = Math.max(0, Math.round((nowMs - ms) / 1000));
  if (seconds < 120) return `${seconds} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
}

export const workloadLink = (id, text) => el("a", { href: `#/workload/${encodeURIComponent(id)}` }, text ?? id);
export const gpuLink = (node, index, text) =>
  el("a", { href: `#/gpu/${encodeURIComponent(node)}/${index}` }, text ?? `${node} GPU ${index}`);

export const nodeLink = (node, text) => el("a", { href: `#/node/${encodeURIComponent(node)}` }, text ?? node);
export const decisionLink = (number, text) => el("a", { href: `#/decision/${number}` }, text ?? `${number}`);

/** What the controller answers; null where the thing is not there. Raises Error with words for people. */
export async function ask(what, given) {
  const response = await fetch(`data/${what}?${new URLSearchParams(given)}`).catch(() => {
    throw new Error("The controller does not answer. This is asked again when it does.");
  });
  if (response.status === 404) return null;
  if (!response.ok) throw new Error((await response.text()).slice(0, 200) || `the controller said ${response.status}`);
  return response.json();
}

/** A name cut in its middle: beginnings and ends are what tells names apart. */
export function short(name, most) {
  if (name.length <= most) return name;
  const half = Math.max(1, Math.floor((most - 1) / 2));
  return `${name.slice(0, half)}…${name.slice(-half)}`;
}
