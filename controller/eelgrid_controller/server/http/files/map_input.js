// Mouse, touch and keys on the map.

import { neighbour } from "./layout.js";
import { byId } from "./dom.js";

/** open(cell) is asked for by a click or Enter, leave() by Escape. */
export function listen(map, model, open, leave) {
  const canvas = map.canvas;
  const [holder, tip] = [byId("map-holder"), byId("tip")];
  let drag = null;
  const fingers = new Map(); // by pointer: where it is

  const place = (event) => {
    const box = holder.getBoundingClientRect(); // the canvas is shifted while it moves
    return [event.clientX - box.left - holder.clientLeft, event.clientY - box.top - holder.clientTop];
  };

  /** Of two fingers: how far they are apart, and the middle. */
  const pinch = () => {
    const [[x, y], [otherX, otherY]] = fingers.values();
    return { apart: Math.max(1, Math.hypot(x - otherX, y - otherY)), x: (x + otherX) / 2, y: (y + otherY) / 2 };
  };
  const pinched = (event) => {
    const before = pinch();
    fingers.set(event.pointerId, place(event));
    const now = pinch();
    map.pan(now.x - before.x, now.y - before.y);
    map.scale(now.apart / before.apart, now.x, now.y);
  };
  const lifted = (event) => {
    fingers.delete(event.pointerId);
    const [left] = fingers.values();
    const wasFar = drag?.far;
    drag = left ? { x: left[0], y: left[1], far: true } : null;
    return wasFar;
  };

  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    fingers.set(event.pointerId, place(event));
    const [x, y] = place(event);
    drag = { x, y, far: fingers.size > 1 };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = place(event);
    if (fingers.size === 2 && fingers.has(event.pointerId)) pinched(event);
    else if (drag && fingers.has(event.pointerId)) {
      fingers.set(event.pointerId, [x, y]);
      const [dx, dy] = [x - drag.x, y - drag.y];
      if (drag.far || Math.hypot(dx, dy) > 4) {
        map.pan(dx, dy);
        drag = { x, y, far: true };
      }
    }
    const cell = map.under(x, y);
    tip.hidden = cell < 0 || Boolean(drag?.far);
    if (cell < 0) return;
    tip.textContent = map.words(cell);
    tip.style.left = `${Math.max(0, Math.min(x + 14, canvas.clientWidth - tip.offsetWidth - 4))}px`;
    const tall = tip.offsetHeight;
    tip.style.top = `${y + 20 + tall > canvas.clientHeight ? y - tall - 8 : y + 14}px`;
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("pointercancel", lifted);
  canvas.addEventListener("pointerup", (event) => {
    if (!fingers.has(event.pointerId)) return;
    const wasDrag = lifted(event);
    const cell = map.under(...place(event));
    if (!wasDrag && cell >= 0) open(cell);
  });
  holder.addEventListener("wheel", (event) => {
    event.preventDefault();
    map.scale(Math.exp(-event.deltaY / 400), ...place(event));
  }, { passive: false });

  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !map.layout || !model.size) return;
    if (/^(Arrow|Page|Home$|End$)/.test(event.key)) {
      const from = map.chosen;
      map.choose(from < 0 ? map.layout.rows[0].first : neighbour(map.layout, map.rowOf, from, event.key));
      byId("said").textContent = map.words(map.chosen);
    } else if (event.key === "Enter" && map.chosen >= 0) open(map.chosen);
    else if (event.key === "+" || event.key === "=") map.scale(1.4);
    else if (event.key === "-") map.scale(1 / 1.4);
    else if (event.key === "0") map.fit();
    else if (event.key === "Escape") {
      tip.hidden = true;
      map.choose(-1);
      leave();
    }
    else return;
    event.preventDefault();
  });

  byId("zoom-in").addEventListener("click", () => map.scale(1.6));
  byId("zoom-out").addEventListener("click", () => map.scale(1 / 1.6));
  byId("zoom-fit").addEventListener("click", () => map.fit());
  byId("colour-by").addEventListener("change", (event) => map.colourBy(event.target.value));
}
