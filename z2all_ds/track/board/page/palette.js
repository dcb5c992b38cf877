// Colours, dashes and signs. Colours differ in lightness too, for those who do not see all hues, and on both grounds.

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

/** The value of one of board.css's own names, such as --ink. */
export function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function dash(number) {
  return DASHES[number % DASHES.length];
}

/** Where dashes are used up, signs on the line tell the next ones apart; null for the first ones. */
export function lineSymbol(number) {
  return number < DASHES.length ? null : SYMBOLS[(Math.floor(number / DASHES.length) - 1) % SYMBOLS.length];
}

/** Of the line at this place where colours tell lines apart: their second round is dashed, and so on. */
export function dashOfRound(place) {
  return Math.floor(Math.max(0, place) / ON_LIGHT.length);
}

/** #rrggbb with an opacity, for fills. */
export function faint(hex, opacity) {
  const parts = [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));
  return `rgba(${parts.join(",")},${opacity})`;
}
