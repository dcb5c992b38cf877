// Colours, dashes and symbols. Colours also differ in lightness, for colour-blind users, in light and dark mode.

const ON_LIGHT = ["#0a6ebd", "#d1560a", "#12855d", "#9a3fb5", "#b8860b", "#c2185b", "#3f51b5", "#5d7a00", "#795548"];
const ON_DARK = ["#5ab0f5", "#ff9d57", "#4cc79a", "#d08be6", "#e6c34d", "#ff7fa8", "#98a6ff", "#b3d15c", "#c9a793"];
const DASHES = ["solid", "dash", "dot", "longdash", "dashdot", "longdashdot"];
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "x"];

const darkness = matchMedia("(prefers-color-scheme: dark)");

export function onSchemeChange(listener) {
  darkness.addEventListener("change", listener);
}

export function isDark() {
  return darkness.matches;
}

export function colour(number) {
  const colours = darkness.matches ? ON_DARK : ON_LIGHT;
  return colours[number % colours.length];
}

/** The value of a CSS variable of board.css, such as --ink. */
export function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function dash(number) {
  return DASHES[number % DASHES.length];
}

/** When all dashes are used, symbols on the line distinguish further lines; null for the first ones. */
export function lineSymbol(number) {
  return number < DASHES.length ? null : SYMBOLS[(Math.floor(number / DASHES.length) - 1) % SYMBOLS.length];
}

/** Dash of the n-th line if colours distinguish lines: after all colours are used, lines are dashed, and so on. */
export function dashOfRound(place) {
  return Math.floor(Math.max(0, place) / ON_LIGHT.length);
}

/** #rrggbb with an opacity, for fills. */
export function faint(hex, opacity) {
  const parts = [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));
  return `rgba(${parts.join(",")},${opacity})`;
}
