// The overview of the cluster, asked for while somebody shows it.

import { ask } from "./dom.js";

const EVERY_MS = 2_000;
const listeners = new Set();
let [timer, last] = [0, null];

/** Calls told(overview, words of an error) at once and then every two seconds; gives what ends it. */
export function watchOverview(told) {
  listeners.add(told);
  if (listeners.size === 1) look();
  else if (last) told(last, "");
  return () => {
    listeners.delete(told);
    if (!listeners.size) clearTimeout(timer);
  };
}

async function look() {
  clearTimeout(timer);
  let error = "";
  try {
    if (!document.hidden) last = await ask("overview", {});
  } catch (failure) {
    error = failure.message;
  }
  if (last || error) for (const told of [...listeners]) told(last, error);
  clearTimeout(timer);
  if (listeners.size) timer = setTimeout(look, EVERY_MS);
}
