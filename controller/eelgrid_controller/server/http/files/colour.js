// Colours of the map: one scale from little to much, which gets only darker (or, on dark ground, only lighter), and colours
// of kinds: seven that people of any colour vision tell apart (Okabe and Ito 2008), one for all others, and a pale one.

const LIGHT = { scale: ["#fff3c4", "#fecb6a", "#f98f3a", "#dd3d2d", "#7f0d28"], none: "#dfe3e8", ink: "#1a2129",
  line: "#aab3bd", bad: "#b3261e", good: "#1a7f4b", quiet: "#56616d", mark: "#0b5cad", ground: "#ffffff", faded: "#f0f2f5",
  kinds: ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#5c6670", "#ccd4dc"] };
const DARK = { scale: ["#434a94", "#7a45a0", "#c9486c", "#f78d45", "#fce78d"], none: "#272e37", ink: "#e6eaef",
  line: "#4a5562", bad: "#ff8a80", good: "#5ccb92", quiet: "#9aa6b3", mark: "#7db7f5", ground: "#1a2028", faded: "#20262f",
  kinds: ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#68727c", "#3a4450"] };

const isDark = matchMedia("(prefers-color-scheme: dark)");
export const onTheme = (changed) => isDark.addEventListener("change", changed);
export const theme = () => (isDark.matches ? DARK : LIGHT);

/** As the inks take it. */
export const rgb = (hex) => `rgb(${parts(hex).join(" ")})`;

const parts = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

/** Sixty-four colours between the stops, so that drawing only looks them up. */
export function ramp(stops) {
  return Array.from({ length: 64 }, (_, step) => {
    const place = (step / 63) * (stops.length - 1);
    const from = Math.min(stops.length - 2, Math.floor(place));
    const [low, high] = [parts(stops[from]), parts(stops[from + 1])];
    return `rgb(${low.map((part, at) => Math.round(part + (high[at] - part) * (place - from))).join(" ")})`;
  });
}

// Of relative luminance (WCAG 2.2); where black and white are as far from a colour, each is at 4.6 to 1.
const MIDDLE = 0.179;
const linear = (part) => (part <= 0.04045 * 255 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4);

/** For each colour of a ramp, the ink that can be read on it. */
export function inks(colours) {
  return colours.map((colour) => {
    const [red, green, blue] = colour.match(/\d+/g).map((part) => linear(Number(part)));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue > MIDDLE ? "#000000" : "#ffffff";
  });
}
