// Commands that the page advises, each with a button that copies it.

import { byId, el } from "./dom.js";

const COPIED_MS = 2_000;

export const command = (text) => el("span", { class: "command" },
  el("code", {}, text), el("button", { type: "button", class: "copy", "data-copy": text, "aria-label": `Copy: ${text}` }, "Copy"));

// A command inside a sentence: what may be typed as it stands, up to the sentence's next sign. `eelctl reconcile it` may not.
const INSIDE = /eelctl (?!\w+ it\b)[a-z-]+(?: [a-z-]+)?(?: --[a-z-]+(?:[= ](?:'[^']*'|[^\s,;']*[^\s,;.:']))?)*(?=[,.;:]|$| and )/g;

/** A sentence, its commands with their buttons. */
export function withCommands(sentence) {
  const parts = [];
  let from = 0;
  for (const match of sentence.matchAll(INSIDE)) {
    parts.push(sentence.slice(from, match.index), command(match[0]));
    from = match.index + match[0].length;
  }
  return [...parts, sentence.slice(from)];
}

/** Over http a browser has no clipboard for pages; then a selected text is copied. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = el("textarea", { class: "unseen", readonly: true, "aria-hidden": "true" });
    field.value = text;
    document.body.append(field);
    field.select();
    const isCopied = document.execCommand("copy");
    field.remove();
    return isCopied;
  }
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest?.("[data-copy]");
  if (!button) return;
  const text = button.dataset.copy;
  const isCopied = await copy(text);
  button.focus({ preventScroll: true });
  byId("said").textContent = isCopied ? `Copied: ${text}` : "The browser does not let this page copy.";
  button.textContent = isCopied ? "Copied" : "Select it";
  setTimeout(() => { button.textContent = "Copy"; }, COPIED_MS);
});
