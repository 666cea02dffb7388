// Colours of the map: one scale from little to much, which gets only darker (or, on dark ground, only lighter).

const LIGHT = { scale: ["#fff3c4", "#fecb6a", "#f98f3a", "#dd3d2d", "#7f0d28"], none: "#dfe3e8", ink: "#1a2129",
  line: "#aab3bd", bad: "#b3261e", good: "#1a7f4b", quiet: "#56616d", mark: "#0b5cad", ground: "#ffffff" };
const DARK = { scale: ["#2f3354", "#6d3f93", "#c9486c", "#f78d45", "#fce78d"], none: "#272e37", ink: "#e6eaef",
  line: "#4a5562", bad: "#ff8a80", good: "#5ccb92", quiet: "#9aa6b3", mark: "#7db7f5", ground: "#1a2028" };

const isDark = matchMedia("(prefers-color-scheme: dark)");
export const onTheme = (changed) => isDark.addEventListener("change", changed);
export const theme = () => (isDark.matches ? DARK : LIGHT);

const parts = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

/** Sixty-four colours between the stops, so that drawing only looks them up. */
export function ramp(stops = theme().scale) {
  return Array.from({ length: 64 }, (_, step) => {
    const place = (step / 63) * (stops.length - 1);
    const from = Math.min(stops.length - 2, Math.floor(place));
    const [low, high] = [parts(stops[from]), parts(stops[from + 1])];
    return `rgb(${low.map((part, at) => Math.round(part + (high[at] - part) * (place - from))).join(" ")})`;
  });
}

/** Ink that can be read on a colour of the ramp. */
export function inkOn(ratio) {
  const onDark = isDark.matches ? ratio > 0.55 : ratio < 0.6;
  return onDark ? "#161b21" : "#ffffff";
}
