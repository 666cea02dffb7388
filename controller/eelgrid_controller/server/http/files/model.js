// What the page knows: the last whole picture with every delta since, and the past as differences.

export const CellState = { OPEN: 0, CUT: 1, CORDONED: 2, GPU_LOST: 3, NODE_LOST: 4 };
const CHANGES_MOST = 10_000; // with those that were asked for
const POWER_MOST = 600;
const COLUMNS = ["power_w", "held_milli", "state"];

export class Model {
  constructor() {
    this.ready = false;
    this.atMs = 0;
    this.counts = null;
    this.queue = { rows: [], reasons: [] };
    this.budgets = [];
    this.powerLine = [];
    this.changes = [];
  }

  whole(frame) {
    this.ready = true;
    this.models = frame.models;
    this.nodes = frame.nodes;
    this.index = frame.gpus.index;
    this.model = frame.gpus.model;
    this.limitW = frame.gpus.limit_w;
    for (const name of COLUMNS) this[name] = Int32Array.from(frame.gpus[name]);
    this.slices = new Map(Object.entries(frame.slices).map(([cell, cut]) => [Number(cell), cut]));
    this.size = this.index.length;
    this.nodeOf = new Int32Array(this.size);
    this.nodes.first.forEach((first, node) => {
      this.nodeOf.fill(node, first, this.nodes.first[node + 1] ?? this.size);
    });
    this.nodeByName = new Map(this.nodes.name.map((name, node) => [name, node]));
    this.powerLine = frame.power_line;
    this.era = frame.era;
    this.changes = frame.changes;
    this.from = frame.changes_from; // every change from this number on is here
    this.hasEarlier = this.from > 1;
    this.isLong = false;
    this.#glance(frame);
  }

  /** Takes a delta; the cells that look otherwise now, or null for all of them. */
  delta(frame) {
    let touched = new Set();
    for (const name of COLUMNS) {
      const news = frame[name];
      if (!news) continue;
      if (news.all) {
        this[name].set(news.all);
        touched = null;
      } else {
        news.at.forEach((cell, at) => { this[name][cell] = news.to[at]; touched?.add(cell); });
      }
    }
    for (const [cell, cut] of Object.entries(frame.slices ?? {})) {
      this.slices.set(Number(cell), cut);
      touched?.add(Number(cell));
    }
    if (frame.power && frame.power[0] !== this.powerLine.at(-1)?.[0]) this.powerLine.push(frame.power);
    this.powerLine.splice(0, this.powerLine.length - POWER_MOST);
    if (frame.changes) {
      this.changes.push(...frame.changes);
      if (!this.isLong) this.#forget(frame.changes_from);
      else if (this.changes.length > CHANGES_MOST) {
        this.#forget(this.changes[this.changes.length - CHANGES_MOST][0]);
        this.hasEarlier = false;
      }
    }
    this.#glance(frame);
    return touched;
  }

  #forget(before) {
    const kept = this.changes.findIndex(([number]) => number >= before);
    this.changes.splice(0, kept);
    this.from = before;
    this.hasEarlier = before > 1;
  }

  /** Takes changes of before the oldest that is here, as the journal tells them. */
  earlier(answer) {
    if (answer.era !== this.era) return; // cells are numbered anew meanwhile; they are asked for again
    this.changes.unshift(...answer.changes);
    this.isLong = true;
    this.hasEarlier = answer.has_more && answer.changes.length > 0 && this.changes.length < CHANGES_MOST;
    this.from = this.changes[0]?.[0] ?? this.from;
  }

  #glance(frame) {
    this.atMs = frame.at_ms;
    for (const name of ["counts", "queue", "budgets"]) if (frame[name]) this[name] = frame[name];
  }

  /** What was held after the change at this position: now, less all that came later. */
  heldAfter(position) {
    const held = this.held_milli.slice();
    for (const change of this.changes.slice(position + 1)) {
      const pairs = change[5];
      for (let at = 0; at < pairs.length; at += 2) held[pairs[at]] -= pairs[at + 1];
    }
    return held;
  }

  cellOf(nodeName, index) {
    return this.cellsOf(nodeName).find((cell) => this.index[cell] === index) ?? -1;
  }

  /** Of a node by its name; none of one that is not there. */
  cellsOf(nodeName) {
    const node = this.nodeByName?.get(nodeName);
    if (node === undefined) return [];
    const first = this.nodes.first[node];
    return Array.from({ length: (this.nodes.first[node + 1] ?? this.size) - first }, (_, at) => first + at);
  }

  nodeName(cell) {
    return this.nodes.name[this.nodeOf[cell]];
  }

  /** One GPU in a sentence. */
  words(cell) {
    const power = this.power_w[cell] < 0 ? "no fresh reading" : `${this.power_w[cell]} W`;
    const state = ["", ", cut by MIG", ", cordoned", ", lost", ", node lost"][this.state[cell]];
    const held = `${this.held_milli[cell] / 1000} held`;
    return `${this.nodeName(cell)} GPU ${this.index[cell]}: ${this.models[this.model[cell]]}, ${power}, ${held}${state}`;
  }

  powerNow() {
    return this.powerLine.at(-1)?.[1] ?? null;
  }
}
