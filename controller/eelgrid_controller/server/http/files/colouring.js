// What the colours of the map say: of each cell a shade, and the legend that is true for it.

import { ask, percent, watts } from "./dom.js";
import { watchOverview } from "./overview.js";
import { CellState } from "./model.js";

const EVERY_MS = 3_000; // columns that only this map needs are asked for as often
const RAMP = 64; // shades of a scale; those after it are of kinds
const [OTHERS, PALE] = [7, 8]; // places of theme().kinds beside the seven that names get
const [COLDEST_C, HOTTEST_C] = [20, 90];
// Of theme().kinds: what nothing is said of is pale.
const IDLE = [["not held", PALE], ["works", 0], ["held but idle", 1]];
const FAULTS = [["no fault", PALE], ["cordoned", 4], ["failing", 6], ["lost", 5]];
const COLUMNS = new Set(["utilization", "temperature", "idle", "namespace", "user"]);

export class Colouring {
  /** changed(cells): these look otherwise, or null for all of them and the legend. */
  constructor(model, changed) {
    this.model = model;
    this.changed = changed;
    this.by = "share";
    this.mostW = 50;
    this.turn = 0;
    this.end = () => {};
    this.reset();
  }

  reset() {
    this.column = null;
    this.names = [];
    this.kinds = new Map(); // of names that have a colour: which
    this.failing = new Set();
  }

  choose(by) {
    this.end();
    this.turn += 1;
    this.reset();
    this.by = by;
    if (COLUMNS.has(by)) this.follow(by, this.turn);
    else if (by === "model") this.nameModels();
    else if (by === "failing") this.end = watchOverview((found) => found && this.onOverview(found));
    this.changed(null);
  }

  /** The fleet is another: cells are numbered anew. */
  rebuild() {
    const { model } = this;
    this.mostW = Math.max(50, model.limitW.reduce((most, limit) => Math.max(most, limit), 0),
      model.power_w.reduce((most, power) => Math.max(most, power), 0));
    this.column = null;
    this.failing = new Set();
    if (COLUMNS.has(this.by) || this.by === "failing") this.choose(this.by);
    else if (this.by === "model") this.nameModels();
  }

  /** The most frequent first. */
  nameModels() {
    const { model } = this;
    if (!model.ready) return;
    const counts = model.models.map((_, at) => [0, at]);
    for (const at of model.model) counts[at][0] += 1;
    this.name(counts.sort(([one], [other]) => other - one).map(([, at]) => model.models[at]));
  }

  async follow(name, mine) {
    let timer = 0;
    this.end = () => clearTimeout(timer);
    const look = async () => {
      try {
        const answer = document.hidden ? null : await ask("column", { name });
        if (mine !== this.turn) return;
        if (answer && answer.era === this.model.era) this.onColumn(answer);
      } catch {
        // The connection's sign tells of it; what was read stays until it heals.
      }
      if (mine === this.turn) timer = setTimeout(look, EVERY_MS);
    };
    await look();
  }

  onColumn({ names, values }) {
    const before = this.column;
    const isSame = before && names.length === this.names.length && names.every((name, at) => name === this.names[at]);
    this.column = Int32Array.from(values);
    if (!isSame) this.name(names);
    const others = new Set();
    if (isSame) values.forEach((value, cell) => { if (value !== before[cell]) others.add(cell); });
    this.changed(isSame ? others : null);
  }

  /** Gives the first names a colour each, which they keep while they are there. */
  name(names) {
    this.names = names;
    for (const name of [...this.kinds.keys()]) if (!names.includes(name)) this.kinds.delete(name);
    for (const name of names.slice(0, OTHERS)) {
      if (this.kinds.has(name) || this.kinds.size === OTHERS) continue;
      const taken = new Set(this.kinds.values());
      this.kinds.set(name, Array.from({ length: OTHERS }, (_, kind) => kind).find((kind) => !taken.has(kind)));
    }
  }

  onOverview({ attention }) {
    const found = new Set();
    for (const { kind, subject } of attention) {
      if (kind !== "failing_gpu") continue;
      const at = subject.lastIndexOf("/");
      found.add(this.model.cellOf(subject.slice(0, at), Number(subject.slice(at + 1))));
    }
    found.delete(-1);
    const others = new Set([...found, ...this.failing].filter((cell) => found.has(cell) !== this.failing.has(cell)));
    this.failing = found;
    if (others.size) this.changed(others);
  }

  /** Of a cell: below 64 of the scale, else of the kinds; -1 where nothing is known. `held` is the past, while it is shown. */
  shade(cell, held) {
    const { model } = this;
    if (held) return scaled(held[cell] / 1000);
    switch (this.by) {
      case "held": return scaled(model.held_milli[cell] / 1000);
      case "power": return model.power_w[cell] < 0 ? -1 : scaled(model.power_w[cell] / this.mostW);
      case "share": return model.power_w[cell] < 0 || !model.limitW[cell] ? -1 : scaled(model.power_w[cell] / model.limitW[cell]);
      case "utilization": return this.read(cell) < 0 ? -1 : scaled(this.read(cell) / 100);
      case "temperature": return this.read(cell) < 0 ? -1 : scaled((this.read(cell) - COLDEST_C) / (HOTTEST_C - COLDEST_C));
      case "idle": return this.read(cell) < 0 ? -1 : RAMP + IDLE[this.read(cell)][1];
      case "failing": return RAMP + FAULTS[this.fault(cell)][1];
      case "model": return RAMP + (this.kinds.get(model.models[model.model[cell]]) ?? OTHERS);
      default: return !this.column ? -1 : RAMP + (this.read(cell) < 0 ? PALE : this.kinds.get(this.names[this.read(cell)]) ?? OTHERS);
    }
  }

  read(cell) {
    return this.column?.[cell] ?? -1;
  }

  fault(cell) {
    const state = this.model.state[cell];
    if (state >= CellState.GPU_LOST) return 3;
    return this.failing.has(cell) ? 2 : state === CellState.CORDONED ? 1 : 0;
  }

  /** What stands in a cell that is large enough. */
  text(cell, held) {
    const { model } = this;
    if (held) return String(held[cell] / 1000);
    if (this.by === "held") return String(model.held_milli[cell] / 1000);
    if (this.by === "utilization") return this.read(cell) < 0 ? "-" : percent(this.read(cell) / 100);
    if (this.by === "temperature") return this.read(cell) < 0 ? "-" : `${this.read(cell)} °C`;
    return model.power_w[cell] < 0 ? "-" : watts(model.power_w[cell]);
  }

  /** What the colour of a cell says beside what is said of it anyway. */
  words(cell) {
    const value = this.read(cell);
    switch (this.by) {
      case "utilization": return value < 0 ? "" : `, ${value} % utilized`;
      case "temperature": return value < 0 ? "" : `, ${value} °C`;
      case "idle": return value < 0 ? "" : `, ${IDLE[value][0]}`;
      case "failing": return this.failing.has(cell) ? ", failing" : "";
      case "namespace": case "user": return value < 0 ? "" : `, ${this.by} ${this.names[value] || "not named"}`;
      default: return "";
    }
  }

  /**
   * {low, high} of a scale, or {kinds: [[place of theme().kinds, words]]}; with `signs`, what else the map shows: the past
   * ("past"), what is "unknown" too, or faults, of which each has a colour of its own ("faults").
   */
  legend(isPast) {
    if (isPast) return { low: "0", high: "1 GPU", signs: "past" };
    switch (this.by) {
      case "held": return { low: "0", high: "1 GPU" };
      case "power": return { low: "0", high: watts(this.mostW), signs: "unknown" };
      case "share": case "utilization": return { low: "0", high: "100 %", signs: "unknown" };
      case "temperature": return { low: `${COLDEST_C} °C`, high: `${HOTTEST_C} °C`, signs: "unknown" };
      case "idle": return { kinds: IDLE.map(([words, kind]) => [kind, words]) };
      case "failing": return { kinds: [FAULTS[0], FAULTS[2]].map(([words, kind]) => [kind, words]), signs: "faults" };
      default: {
        const kinds = this.names.filter((name) => this.kinds.has(name)).map((name) => [this.kinds.get(name), name || `no ${this.by}`]);
        const others = this.names.length - kinds.length;
        if (others > 0) kinds.push([OTHERS, `${others} other${others === 1 ? "" : "s"}`]);
        return { kinds: this.by === "model" ? kinds : [...kinds, [PALE, "not held"]] };
      }
    }
  }
}

const scaled = (ratio) => Math.round((RAMP - 1) * Math.min(1, Math.max(0, ratio)));
