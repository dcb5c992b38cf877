// The view that the user has chosen. It is stored in the URL's hash, so that a link shows the same.

export const X_KINDS = ["step", "tokens", "time"];
const LARGEST_WINDOW = 1e5;
const DEFAULT_WINDOW = 10;

export const view = {
  x: "step",
  log: false,
  /** Window of the smoothing in steps; 1 is none. */
  window: DEFAULT_WINDOW,
  /** Names of runs, since numbers change when the board is started with other runs. */
  hidden: new Set(),
  /** [from, to] in the units of x: steps, tokens, seconds; null shows everything. */
  zoom: null,
  paused: false,
};

/** The slider is logarithmic: windows from 2 to 100,000 steps are useful. */
export function windowOfSlider(place) {
  return place <= 0 ? 1 : Math.max(2, Math.round(LARGEST_WINDOW ** (place / 100)));
}

export function sliderOfWindow(window) {
  return window <= 1 ? 0 : Math.round((100 * Math.log(window)) / Math.log(LARGEST_WINDOW));
}

export function readHash() {
  const words = new URLSearchParams(location.hash.slice(1));
  view.x = X_KINDS.includes(words.get("x")) ? words.get("x") : "step";
  view.log = words.get("log") === "1";
  const window = words.has("smooth") ? Number(words.get("smooth")) : DEFAULT_WINDOW;
  view.window = Number.isFinite(window) ? Math.min(LARGEST_WINDOW, Math.max(1, window)) : DEFAULT_WINDOW;
  view.hidden = new Set(words.getAll("hide"));
  const ends = words.has("zoom") ? words.get("zoom").split(",").map(Number) : [];
  view.zoom = ends.length === 2 && ends.every(Number.isFinite) && ends[0] < ends[1] ? ends : null;
}

export function writeHash() {
  const words = new URLSearchParams();
  if (view.x !== "step") words.set("x", view.x);
  if (view.log) words.set("log", "1");
  if (view.window !== DEFAULT_WINDOW) words.set("smooth", String(view.window));
  for (const name of view.hidden) words.append("hide", name);
  if (view.zoom) words.set("zoom", view.zoom.map((end) => Number(end.toPrecision(8))).join(","));
  const hash = words.toString();
  history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
}
