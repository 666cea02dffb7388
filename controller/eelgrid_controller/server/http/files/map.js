// The map on its canvas: draws everything when the view changes, and only changed cells when readings do. Ten thousand cells
// take longer than a frame: while hands move the map its picture is shifted, and drawn anew when they rest; outlines have a
// canvas of their own, so that choosing a cell draws no other.

import { FADED, drawSigns } from "./cell_signs.js";
import { inks, onTheme, ramp, rgb, theme } from "./colour.js";
import { Colouring } from "./colouring.js";
import { CELL, cellAt, layOut } from "./layout.js";
import { byId, short } from "./dom.js";
import { drawLegend } from "./legend.js";

const NAMES_PX = 31; // from which node names can be read: they are a quarter as high
const REST_MS = 80;
const PIECE = 2_500; // cells that a new fleet's first picture takes in each animation frame: some 4 ms

const LETTERS = 7; // of a node's name, above each of its cells
const TITLE_LETTERS = { wide: 1.7, least: 3 }; // in a square of their height; fewer say nothing

export class FleetMap {
  constructor(model) {
    this.model = model;
    this.canvas = byId("map");
    this.pen = this.canvas.getContext("2d", { alpha: false });
    this.marksCanvas = byId("marks");
    this.colouring = new Colouring(model, (cells) => {
      if (cells === null) this.legend();
      this.touch(cells);
    });
    this.only = null; // of cells that somebody looks for: 1
    this.held = null; // the past, while it is shown
    this.marks = new Map(); // cells that a decision changed: more or less held
    this.chosen = -1;
    this.layout = null;
    [this.zoom, this.left, this.top, this.ratio] = [1, 0, 0, 1];
    this.shown = { zoom: 1, left: 0, top: 0 }; // the view of the picture that is there
    this.resting = 0;
    this.fitted = true;
    this.drawn = { all: 0, cells: 0, pieces: 0 }; // for tests and the curious
    this.waiting = null; // cells to draw again, or "all"
    this.undrawn = null; // rows in sight that the first picture lacks
    onTheme(() => this.restyle());
    new ResizeObserver(() => this.resize()).observe(byId("map-holder"));
    this.restyle();
  }

  /** The fleet is another, or for the first time there. */
  rebuild() {
    const { clientWidth, clientHeight } = byId("map-holder");
    this.layout = layOut(this.model, Math.max(0.3, clientWidth / Math.max(1, clientHeight)));
    this.rowOf = new Int32Array(this.model.size);
    this.layout.rows.forEach((row, at) => this.rowOf.fill(at, row.first, row.end));
    if (this.era !== this.model.era) {
      this.era = this.model.era;
      this.colouring.rebuild();
      this.only = null; // cells are numbered anew: who looks for some says so again
    }
    if (this.fitted) this.fit();
    this.legend();
    this.waiting = "pieces";
    this.soon();
  }

  resize() {
    const { clientWidth, clientHeight } = byId("map-holder");
    if (!clientWidth || !clientHeight) return;
    this.ratio = window.devicePixelRatio || 1;
    for (const canvas of [this.canvas, this.marksCanvas]) {
      canvas.width = Math.round(clientWidth * this.ratio);
      canvas.height = Math.round(clientHeight * this.ratio);
    }
    if (this.model.ready) this.rebuild();
  }

  restyle() {
    this.legend();
    this.redraw();
  }

  colourBy(what) {
    this.colouring.choose(what);
  }

  /** Fades all cells but these; null fades none. */
  highlight(cells) {
    if (!cells && !this.only) return;
    const before = this.only;
    this.only = cells ? new Uint8Array(this.model.size) : null;
    for (const cell of cells ?? []) this.only[cell] = 1;
    if (before && this.only && before.every((is, cell) => is === this.only[cell])) return;
    this.redraw();
  }

  /** One GPU in a sentence. */
  words(cell) {
    return this.model.words(cell) + this.colouring.words(cell);
  }

  /** Shows what was held at another time, with what one decision changed; null for now. */
  past(held, change) {
    const before = this.held;
    this.held = held;
    this.marks = new Map();
    for (let at = 0; held && at < change[5].length; at += 2) this.marks.set(change[5][at], change[5][at + 1]);
    if (before && held) {
      const others = new Set();
      held.forEach((milli, cell) => { if (milli !== before[cell]) others.add(cell); });
      this.touch(others);
      this.outlines();
    } else if (before || held) {
      byId("colour-by").disabled = held !== null;
      this.legend();
      this.redraw();
    }
  }

  fit() {
    if (!this.layout) return;
    const [width, height] = [this.canvas.width / this.ratio, this.canvas.height / this.ratio];
    this.zoom = Math.min((width - 24) / this.layout.width, (height - 24) / this.layout.height, 6);
    this.left = (width - this.zoom * this.layout.width) / 2;
    this.top = Math.max(8, (height - this.zoom * this.layout.height) / 2);
    this.fitted = true;
    this.redraw();
  }

  /** Nearer or farther around a point of the canvas, in CSS pixels. */
  scale(factor, x = this.canvas.clientWidth / 2, y = this.canvas.clientHeight / 2) {
    const zoom = Math.min(20, Math.max(0.05, this.zoom * factor));
    this.left = x - ((x - this.left) * zoom) / this.zoom;
    this.top = y - ((y - this.top) * zoom) / this.zoom;
    this.zoom = zoom;
    this.moved();
  }

  pan(dx, dy) {
    this.left += dx;
    this.top += dy;
    this.moved();
  }

  moved() {
    const { shown } = this;
    const factor = this.zoom / shown.zoom;
    this.canvas.style.transform = `translate(${this.left - factor * shown.left}px, ${this.top - factor * shown.top}px) scale(${factor})`;
    this.fitted = false;
    this.outlines();
    clearTimeout(this.resting);
    this.resting = setTimeout(() => this.redraw(), REST_MS);
  }

  unshift() {
    clearTimeout(this.resting);
    this.shown = { zoom: this.zoom, left: this.left, top: this.top };
    this.canvas.style.transform = "";
  }

  under(x, y) {
    return this.layout ? cellAt(this.layout, (x - this.left) / this.zoom, (y - this.top) / this.zoom) : -1;
  }

  choose(cell) {
    if (cell === this.chosen) return;
    this.chosen = cell;
    if (cell >= 0 && this.layout) this.bringIn(cell);
    this.outlines();
  }

  bringIn(cell) {
    const [x, y] = [this.left + this.zoom * this.layout.x[cell], this.top + this.zoom * this.layout.y[cell]];
    const [width, height, side] = [this.canvas.clientWidth, this.canvas.clientHeight, this.zoom * CELL];
    const into = (from, most) => (from < 0 ? 20 - from : from + side > most ? most - side - 20 - from : 0);
    const [dx, dy] = [into(x, width), into(y, height)];
    if (dx || dy) this.pan(dx, dy);
  }

  redraw() {
    this.waiting = "all";
    this.soon();
  }

  /** Only these cells look otherwise; null for any number of them. */
  touch(cells) {
    if (typeof this.waiting === "string" || cells?.size === 0) return;
    if (cells === null) this.waiting = "all";
    else this.waiting = new Set([...(this.waiting ?? []), ...cells]);
    this.soon();
  }

  soon() {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => {
      this.asked = false;
      if (!this.layout) return;
      const waiting = this.waiting;
      if (typeof waiting === "string" || !this.undrawn) {
        this.waiting = null;
        if (waiting) this.draw(waiting);
      } else this.piece();
      if (this.undrawn || this.waiting) this.soon();
    });
  }

  /** Goes on with the first picture. */
  piece() {
    this.aim();
    let cells = 0;
    let to = 0;
    while (to < this.undrawn.length && cells < PIECE) {
      cells += this.undrawn[to].end - this.undrawn[to].first;
      to += 1;
    }
    this.rows(this.undrawn.slice(0, to));
    this.undrawn = to < this.undrawn.length ? this.undrawn.slice(to) : null;
    this.drawn.pieces += 1;
    if (!this.undrawn) {
      if (this.drawn.all === 0) performance.mark("map");
      this.drawn.all += 1;
    }
  }

  /** Sets the pen up; true where the theme is another than that of the last picture. */
  aim() {
    const { zoom, left, top } = this.shown;
    const scale = zoom * this.ratio;
    this.pen.setTransform(scale, 0, 0, scale, left * this.ratio, top * this.ratio);
    this.pixels = zoom * CELL;
    const isOther = this.colour !== theme();
    if (isOther) {
      this.colour = theme();
      this.colours = [...ramp(this.colour.scale), ...this.colour.kinds.map(rgb)];
      this.inks = inks(this.colours);
    }
    return isOther;
  }

  /** "all" at once, for hands that wait; all in "pieces", so that everything else goes on; or some cells. */
  draw(waiting) {
    const pen = this.pen;
    if (typeof waiting === "string") this.unshift();
    if (this.aim() && typeof waiting !== "string") {
      this.draw("all");
    } else if (typeof waiting === "string") {
      this.outlines();
      pen.save();
      pen.setTransform(1, 0, 0, 1, 0, 0);
      pen.fillStyle = this.colour.ground;
      pen.fillRect(0, 0, this.canvas.width, this.canvas.height);
      pen.restore();
      this.titles();
      const seen = this.layout.rows.filter((row) => this.isSeen(row.x, row.y, (row.end - row.first) * (CELL + 1), CELL + 4));
      this.undrawn = waiting === "pieces" && seen.length ? seen : null;
      if (this.undrawn) {
        this.piece();
        return;
      }
      this.rows(seen);
      this.drawn.all += 1;
    } else {
      for (const cell of waiting) {
        if (!this.isSeen(this.layout.x[cell], this.layout.y[cell], CELL, CELL)) continue;
        const shade = this.shade(cell);
        pen.fillStyle = this.paint(shade);
        pen.fillRect(this.layout.x[cell], this.layout.y[cell], CELL, CELL);
        drawSigns(this, cell, shade);
      }
      this.drawn.cells += waiting.size;
    }
  }

  isSeen(x, y, width, height) {
    const { zoom } = this.shown;
    const [left, top] = [-this.shown.left / zoom, -this.shown.top / zoom];
    return x + width > left && y + height > top && x < left + this.canvas.clientWidth / zoom
      && y < top + this.canvas.clientHeight / zoom;
  }

  /** Rows. Cells of one colour are drawn one after the other: changing the pen's colour costs the most. */
  rows(seen) {
    const { pen, layout } = this;
    const byShade = new Map();
    for (const row of seen) {
      for (let cell = row.first; cell < row.end; cell += 1) {
        const shade = this.shade(cell);
        if (!byShade.has(shade)) byShade.set(shade, []);
        byShade.get(shade).push(cell);
      }
    }
    for (const [shade, cells] of byShade) {
      pen.fillStyle = this.paint(shade);
      for (const cell of cells) pen.fillRect(layout.x[cell], layout.y[cell], CELL, CELL);
    }
    for (const row of seen) {
      for (let cell = row.first; cell < row.end; cell += 1) drawSigns(this, cell, this.shade(cell));
      this.name(row);
    }
  }

  name(row) {
    if (this.pixels >= NAMES_PX) {
      this.pen.fillStyle = this.colour.quiet;
      this.pen.font = "2.6px system-ui, sans-serif";
      this.pen.textBaseline = "alphabetic";
      this.pen.fillText(short(this.model.nodes.name[row.node], (row.end - row.first) * LETTERS), row.x, row.y + 2.4);
    }
  }

  titles() {
    const pen = this.pen;
    const { zoom } = this.shown;
    const size = Math.min(15, Math.max(2.6, 13 / zoom));
    pen.font = `${size}px system-ui, sans-serif`;
    pen.textBaseline = "alphabetic";
    pen.fillStyle = this.colour.ink;
    if (zoom * size < 6) return;
    for (const { title, room, x, y } of this.layout.blocks) {
      const letters = Math.floor((TITLE_LETTERS.wide * room) / size);
      if (title && letters >= TITLE_LETTERS.least) pen.fillText(short(title, letters), x, y + 16);
    }
  }

  /** Of the colours; -1 where nothing is known, -2 where others are looked for. */
  shade(cell) {
    return this.only && !this.only[cell] ? FADED : this.colouring.shade(cell, this.held);
  }

  paint(shade) {
    return shade >= 0 ? this.colours[shade] : shade === FADED ? this.colour.faded : this.colour.none;
  }

  /** Around cells that a decision changed, and the chosen one. */
  outlines() {
    if (!this.layout) return;
    const pen = this.marksCanvas.getContext("2d");
    const colour = theme();
    pen.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    pen.clearRect(0, 0, this.canvas.clientWidth, this.canvas.clientHeight);
    for (const [cell, milli] of this.marks) this.outline(pen, cell, colour, milli > 0 ? "good" : "bad");
    if (this.chosen >= 0 && this.chosen < this.model.size) this.outline(pen, this.chosen, colour, "mark");
  }

  /** Around a cell, of the same width at every zoom, on a rim that parts it from any colour. */
  outline(pen, cell, colour, name) {
    const side = this.zoom * CELL + 2;
    for (const [ink, width] of [[colour.ground, 5], [colour[name], 3]]) {
      pen.strokeStyle = ink;
      pen.lineWidth = width;
      pen.strokeRect(this.left + this.zoom * this.layout.x[cell] - 1, this.top + this.zoom * this.layout.y[cell] - 1, side, side);
    }
  }

  legend() {
    drawLegend(this.colouring.legend(this.held !== null));
  }
}
