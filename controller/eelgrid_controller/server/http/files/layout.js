// Where each GPU lies on the map: racks as boxes, a node as a row of cells in its rack. In units, not pixels.

export const CELL = 10;
const STEP = 11; // a cell and its gap
const ROW = 14; // a row and the strip for the node's name
const TITLE = 20;
const BETWEEN = 12;
const ROWS_MOST = 32;
const ROWS_UNRACKED = 16;

/** {x, y} of every cell in Float32Arrays, boxes with titles, and the whole's width and height. */
export function layOut(model, aspect) {
  const blocks = blocksOf(model);
  const area = blocks.reduce((sum, block) => sum + (block.w + BETWEEN) * (block.h + BETWEEN), 0);
  const widest = blocks.reduce((most, block) => Math.max(most, block.w), 0);
  const target = Math.max(widest, Math.sqrt(area * aspect));
  const x = new Float32Array(model.size);
  const y = new Float32Array(model.size);
  const rows = []; // nodes in the order in which eyes and arrow keys meet them
  let [left, top, shelf, width] = [0, 0, 0, 0];
  for (const block of blocks) {
    if (left > 0 && left + block.w > target) {
      [left, top, shelf] = [0, top + shelf + BETWEEN, 0];
    }
    [block.x, block.y] = [left, top];
    block.nodes.forEach((node, row) => {
      const rowY = top + TITLE + row * ROW;
      const [first, end] = span(model, node);
      for (let cell = first; cell < end; cell += 1) {
        x[cell] = left + (cell - first) * STEP;
        y[cell] = rowY + 3;
      }
      rows.push({ node, first, end, x: left, y: rowY });
    });
    left += block.w + BETWEEN;
    shelf = Math.max(shelf, block.h);
    width = Math.max(width, left - BETWEEN);
  }
  nameRoom(blocks, width);
  return { x, y, rows, blocks, width: Math.max(1, width), height: Math.max(1, top + shelf), cells: grid(x, y) };
}

/** Gives each box with a title the room for it: up to the next title on its shelf, or to the end of the whole. */
function nameRoom(blocks, width) {
  let next = null;
  for (const block of blocks.toReversed()) {
    if (!block.title) continue;
    block.room = (next?.y === block.y ? next.x - BETWEEN : width) - block.x;
    next = block;
  }
}

function span(model, node) {
  return [model.nodes.first[node], model.nodes.first[node + 1] ?? model.size];
}

function blocksOf(model) {
  const groups = new Map();
  const byName = new Intl.Collator("en", { numeric: true }).compare;
  const order = model.nodes.name.map((_, node) => node).filter((node) => span(model, node)[0] < span(model, node)[1]);
  for (const node of order) {
    const rack = model.nodes.rack[node];
    const key = rack ? `rack ${rack}` : model.nodes.pool[node] ? `pool ${model.nodes.pool[node]}` : "";
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(node);
  }
  const blocks = [];
  for (const [key, nodes] of [...groups].sort((one, other) => byName(one[0], other[0]))) {
    nodes.sort((one, other) => byName(model.nodes.name[one], model.nodes.name[other]));
    const most = key.startsWith("rack") ? ROWS_MOST : ROWS_UNRACKED;
    for (let from = 0; from < nodes.length; from += most) {
      const part = nodes.slice(from, from + most);
      const wide = part.reduce((widest, node) => Math.max(widest, span(model, node)[1] - span(model, node)[0]), 1);
      const title = key.replace(/^rack (.*\/)?/, "") || "nodes"; // of a path, its last part
      blocks.push({ title: from ? "" : title, nodes: part, w: wide * STEP - 1, h: TITLE + part.length * ROW });
    }
  }
  return blocks;
}

// Cells by square of the plane, to find the one under a pointer.
const SQUARE = 64;
function grid(x, y) {
  const squares = new Map();
  for (let cell = 0; cell < x.length; cell += 1) {
    const key = `${Math.floor(x[cell] / SQUARE)},${Math.floor(y[cell] / SQUARE)}`;
    if (!squares.has(key)) squares.set(key, []);
    squares.get(key).push(cell);
  }
  return squares;
}

/** The cell at a point, or -1. */
export function cellAt(layout, px, py) {
  for (const dx of [0, 1]) {
    for (const dy of [0, 1]) {
      const key = `${Math.floor((px - dx * CELL) / SQUARE)},${Math.floor((py - dy * CELL) / SQUARE)}`;
      for (const cell of layout.cells.get(key) ?? []) {
        const [over, down] = [px - layout.x[cell], py - layout.y[cell]];
        if (over >= 0 && over < STEP && down >= 0 && down < STEP) return cell;
      }
    }
  }
  return -1;
}

const ROWS_OF = { ArrowUp: -1, ArrowDown: 1, PageUp: -ROWS_UNRACKED, PageDown: ROWS_UNRACKED };

/** The cell that a key leads to. */
export function neighbour(layout, rowOf, cell, key) {
  const at = rowOf[cell];
  const row = layout.rows[at];
  if (key === "ArrowLeft") return cell > row.first ? cell - 1 : (layout.rows[at - 1]?.end ?? cell + 1) - 1;
  if (key === "ArrowRight") return cell < row.end - 1 ? cell + 1 : (layout.rows[at + 1]?.first ?? cell);
  if (key === "Home") return layout.rows[0].first;
  if (key === "End") return layout.rows.at(-1).end - 1;
  const next = layout.rows[Math.min(layout.rows.length - 1, Math.max(0, at + ROWS_OF[key]))];
  return next === row ? cell : Math.min(next.end - 1, next.first + cell - row.first);
}
