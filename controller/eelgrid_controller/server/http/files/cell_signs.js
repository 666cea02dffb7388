// What lies over a cell's colour on the map: signs of its state, its value and its MIG slices.

import { CellState } from "./model.js";
import { CELL } from "./layout.js";

export const FADED = -2; // the shade of cells that nobody looks for
const DETAIL_PX = 35; // of a cell, from which slices and values can be read

/** map: what is drawn on, with its pen set up; shade: of the cell, below 0 where it has no colour. */
export function drawSigns(map, cell, shade) {
  const { pen, model, colour } = map;
  const state = map.held ? CellState.OPEN : model.state[cell];
  const isNear = map.pixels >= DETAIL_PX;
  if (shade === FADED || (state === CellState.OPEN && !isNear)) return;
  const [x, y] = [map.layout.x[cell], map.layout.y[cell]];
  const ink = shade < 0 ? colour.ink : map.inks[shade];
  if (isNear) drawDetail(map, cell, x, y, ink);
  if (state >= CellState.CORDONED) {
    pen.beginPath();
    pen.moveTo(x + 2.5, y + 3.5);
    pen.lineTo(x + 7.5, y + 8.5);
    if (state !== CellState.CORDONED) {
      pen.moveTo(x + 7.5, y + 3.5);
      pen.lineTo(x + 2.5, y + 8.5);
    }
    // On a rim that parts it from any colour below.
    for (const [stroke, width] of [[colour.ground, 2.4], [state === CellState.CORDONED ? colour.quiet : colour.bad, 1.2]]) {
      pen.strokeStyle = stroke;
      pen.lineWidth = width;
      pen.stroke();
    }
  } else if (state === CellState.CUT && !isNear && map.pixels >= 5) {
    pen.fillStyle = ink;
    pen.fillRect(x + 4.6, y + 1, 0.8, 8);
  }
}

function drawDetail(map, cell, x, y, ink) {
  const { pen, colour } = map;
  pen.textBaseline = "middle";
  pen.fillStyle = ink;
  pen.font = "2.3px system-ui, sans-serif";
  pen.fillText(map.colouring.text(cell, map.held), x + 0.6, y + 1.9, CELL - 1);
  const cut = map.held ? null : map.model.slices.get(cell);
  if (!cut?.length) return;
  const whole = Math.max(8, ...cut.map(([start, size]) => start + size));
  for (const [start, size, profile, isHeld] of cut) {
    const [left, width] = [x + 0.4 + (9.2 * start) / whole, (9.2 * size) / whole - 0.25];
    pen.fillStyle = isHeld ? colour.mark : colour.none;
    pen.fillRect(left, y + 3.6, width, 5.8);
    pen.strokeStyle = colour.line;
    pen.lineWidth = 0.12;
    pen.strokeRect(left, y + 3.6, width, 5.8);
    pen.save();
    pen.translate(left + width / 2, y + 9);
    pen.rotate(-Math.PI / 2);
    pen.fillStyle = isHeld ? colour.ground : colour.ink;
    pen.font = `${Math.min(1.5, width)}px system-ui, sans-serif`;
    pen.fillText(profile, 0, 0, 5.2);
    pen.restore();
  }
}
