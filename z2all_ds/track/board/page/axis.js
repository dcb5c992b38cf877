// The x axis that all charts share: its unit, its range, zoom and pan.

import { isNumber } from "./format.js";
import { xOf } from "./marks.js";

const TIME_UNITS = [
  { upTo: 600, factor: 1, title: "seconds since the start", hover: "%{x:.4~g} s" },
  { upTo: 3 * 3600, factor: 60, title: "minutes since the start", hover: "%{x:.4~g} min" },
  { upTo: 4 * 86400, factor: 3600, title: "hours since the start", hover: "%{x:.4~g} h" },
  { upTo: Infinity, factor: 86400, title: "days since the start", hover: "%{x:.4~g} d" },
];

/** {factor, title, hover}: x is divided by `factor` before it is drawn. */
export function unitOf(xKind, [, last]) {
  if (xKind === "time") return TIME_UNITS.find(({ upTo }) => last <= upTo);
  if (xKind === "tokens") return { factor: 1, title: "tokens", hover: "%{x:.4~s} tokens" };
  return { factor: 1, title: "step", hover: "step %{x:,.7~g}" };
}

/** From the first to the last x of all these runs; the last events are later than the last step. */
export function wholeRange(runs, curves, events, xKind) {
  const ends = runs.map((run) => curves.extent(run, xKind));
  const marks = runs.map((run) => xOf(events.of(run.id).at(-1) || {}, xKind)).filter(isNumber);
  const from = Math.min(...ends.map(([first]) => first));
  const to = Math.max(...ends.map(([, last]) => last), ...marks);
  return runs.length ? [from, to] : [0, 1];
}

/** With a margin at both ends, so that the first and last point are fully visible. */
export function padded([from, to]) {
  const air = (to - from) * 0.015 || 0.5;
  return [from - air, to + air];
}

/** The range `factor` times as wide, around its middle; null if that is everything. */
export function zoomed([from, to], factor, all) {
  const middle = (from + to) / 2;
  const half = (factor * (to - from)) / 2;
  return within([middle - half, middle + half], all);
}

export function panned([from, to], share, all) {
  const move = share * (to - from);
  const [first, last] = padded(all);
  const allowed = Math.min(Math.max(move, first - from), last - to);
  return move * allowed > 0 ? within([from + allowed, to + allowed], all) : [from, to];
}

/** Limited to the existing range; null if that is everything. */
export function within([from, to], all) {
  const [first, last] = padded(all);
  const cut = [Math.max(from, first), Math.min(to, last)];
  const isAll = cut[1] - cut[0] >= 0.98 * (last - first) || cut[1] <= cut[0];
  return isAll ? null : cut;
}
