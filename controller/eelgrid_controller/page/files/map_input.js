// Mouse, touch and keys on the map.

import { neighbour } from "./layout.js";
import { byId } from "./dom.js";

export function listen(map, model, open) {
  const canvas = map.canvas;
  const tip = byId("tip");
  let drag = null;

  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };

  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, y: event.clientY, far: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = place(event);
    if (drag) {
      const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
      if (drag.far || Math.hypot(dx, dy) > 4) {
        map.pan(dx, dy);
        drag = { x: event.clientX, y: event.clientY, far: true };
      }
    }
    const cell = map.under(x, y);
    tip.hidden = cell < 0 || Boolean(drag?.far);
    if (cell < 0) return;
    tip.textContent = model.words(cell);
    tip.style.left = `${Math.max(0, Math.min(x + 14, canvas.clientWidth - tip.offsetWidth - 4))}px`;
    tip.style.top = `${y + 34 > canvas.clientHeight ? y - 32 : y + 14}px`;
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("pointerup", (event) => {
    const wasDrag = drag?.far;
    drag = null;
    const cell = map.under(...place(event));
    if (!wasDrag && cell >= 0) open(cell);
  });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    map.scale(Math.exp(-event.deltaY / 400), ...place(event));
  }, { passive: false });

  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !map.layout || !model.size) return;
    if (event.key.startsWith("Arrow")) {
      const from = map.chosen;
      map.choose(from < 0 ? map.layout.rows[0].first : neighbour(map.layout, map.rowOf, from, event.key));
      byId("said").textContent = model.words(map.chosen);
    } else if (event.key === "Enter" && map.chosen >= 0) open(map.chosen);
    else if (event.key === "+" || event.key === "=") map.scale(1.4);
    else if (event.key === "-") map.scale(1 / 1.4);
    else if (event.key === "0") map.fit();
    else return;
    event.preventDefault();
  });

  byId("zoom-in").addEventListener("click", () => map.scale(1.6));
  byId("zoom-out").addEventListener("click", () => map.scale(1 / 1.6));
  byId("zoom-fit").addEventListener("click", () => map.fit());
  byId("colour-by").addEventListener("change", (event) => map.colourBy(event.target.value));
}
