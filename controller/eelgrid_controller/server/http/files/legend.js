// The legend of the map: its scale, and the signs that lie over cells.

import { byId, el, short } from "./dom.js";
import { theme } from "./colour.js";

const LETTERS_MOST = 24;

/** As `Colouring.legend` gives it. */
export function drawLegend({ low, high, kinds, signs = "" }) {
  if (kinds) {
    byId("legend").replaceChildren(...kinds.map(([kind, words]) => swatch(theme().kinds[kind], words)), ...drawSigns(signs));
    return;
  }
  const scale = el("span", { class: "scale" });
  scale.style.background = `linear-gradient(90deg, ${theme().scale.join(", ")})`;
  byId("legend").replaceChildren(low, scale, high, ...drawSigns(signs));
}

function swatch(colour, words) {
  const box = el("span", { class: "swatch", "aria-hidden": "true" });
  box.style.background = colour;
  return el("span", { class: "sign", title: words }, box, short(words, LETTERS_MOST));
}

function drawSigns(signs) {
  const sign = (draw, words) => {
    const canvas = el("canvas", { width: 28, height: 28, "aria-hidden": "true" });
    draw(canvas.getContext("2d"), theme());
    return el("span", { class: "sign" }, canvas, words);
  };
  const stroke = (pen, colour, points) => {
    pen.strokeStyle = colour;
    pen.lineWidth = 4;
    for (const [x, y, toX, toY] of points) {
      pen.beginPath();
      pen.moveTo(x, y);
      pen.lineTo(toX, toY);
      pen.stroke();
    }
  };
  const ground = (pen, colour) => { pen.fillStyle = colour; pen.fillRect(0, 0, 28, 28); };
  if (signs === "past") {
    const box = (name) => (pen, one) => { pen.strokeStyle = one[name]; pen.lineWidth = 6; pen.strokeRect(3, 3, 22, 22); };
    return [sign(box("good"), "more held"), sign(box("bad"), "less held")];
  }
  return [
    signs === "unknown" && sign((pen, one) => ground(pen, one.none), "no reading"),
    sign((pen, one) => { ground(pen, one.scale[1]); pen.fillStyle = one.ink; pen.fillRect(12, 2, 4, 24); }, "MIG"),
    sign((pen, one) => { ground(pen, signs === "faults" ? one.kinds[4] : one.none); stroke(pen, one.quiet, [[5, 5, 23, 23]]); }, "cordoned"),
    sign((pen, one) => { ground(pen, signs === "faults" ? one.kinds[5] : one.none); stroke(pen, one.bad, [[5, 5, 23, 23], [23, 5, 5, 23]]); }, "lost"),
  ].filter(Boolean);
}
