// Events on the loss curve: a symbol for each kind, at the height of the smoothed curve.

import { make, makeSvg } from "./dom.js";
import { isNumber, plotlyText } from "./format.js";
import { css } from "./palette.js";

const UP = "M6 1.5l5 9h-10z";
const RIGHT = "M3 1.5l7 4.5-7 4.5z";
const SQUARE = "M2 2h8v8h-8z";
const CIRCLE = "M6 2a4 4 0 1 0 .01 0z";
const CROSS = "M4.5 1h3v3.5h3.5v3h-3.5v3.5h-3v-3.5h-3.5v-3h3.5z";
const DIAGONAL_CROSS = "M3 1l3 3 3-3 2 2-3 3 3 3-2 2-3-3-3 3-2-2 3-3-3-3z";
const STAR = "M6 .8l1.6 3.4 3.7.5-2.7 2.6.7 3.7-3.3-1.8-3.3 1.8.7-3.7-2.7-2.6 3.7-.5z";

/** In the order of the legend. `path` draws the symbol within 12 by 12, `symbol` is Plotly's of the same shape. */
export const KINDS = {
  started: { word: "start", symbol: "triangle-right", path: RIGHT, colour: "--good" },
  restart: { word: "restart", symbol: "triangle-right-open", path: RIGHT, isOpen: true, colour: "--good" },
  stage: { word: "stage", symbol: "diamond", path: "M6 1l5 5-5 5-5-5z", colour: "--stage" },
  checkpoint: { word: "checkpoint", symbol: "circle-open", path: CIRCLE, isOpen: true, colour: "--quiet" },
  spike: { word: "spike", symbol: "triangle-up", path: UP, colour: "--bad" },
  new_level: { word: "new level", symbol: "triangle-up-open", path: UP, isOpen: true, colour: "--warn" },
  rolled_back: { word: "rollback", symbol: "triangle-left", path: "M9 1.5l-7 4.5 7 4.5z", colour: "--warn" },
  fault: { word: "fault", symbol: "x", path: DIAGONAL_CROSS, colour: "--bad" },
  recovered: { word: "recovered", symbol: "cross", path: CROSS, colour: "--good" },
  stopped: { word: "stopped", symbol: "square", path: SQUARE, colour: "--warn" },
  requeue: { word: "requeue", symbol: "square-open", path: SQUARE, isOpen: true, colour: "--warn" },
  done: { word: "done", symbol: "star", path: STAR, colour: "--good" },
  failed: { word: "failed", symbol: "x-open", path: DIAGONAL_CROSS, isOpen: true, colour: "--bad" },
};

const UNKNOWN = { word: "event", symbol: "circle", path: CIRCLE, colour: "--quiet" };

/** `event.event` may be unknown to this page. */
export function kindOf(event) {
  return Object.hasOwn(KINDS, event.event) ? KINDS[event.event] : { ...UNKNOWN, word: event.event };
}

export function signOf(kind) {
  const shape = makeSvg("path", { d: kind.path, fill: kind.isOpen ? "none" : "currentColor", stroke: "currentColor" });
  const sign = makeSvg("svg", { viewBox: "0 0 12 12", width: "12", height: "12", "aria-hidden": "true" }, shape);
  const holder = make("span", { className: "sign" }, sign);
  holder.style.color = `var(${kind.colour})`;
  return holder;
}

/** The event's position on the x axis, in its units; null if unknown. */
export function xOf(event, xKind) {
  return { step: event.step, tokens: event.tokens_seen ?? (event.step === 0 ? 0 : null), time: event.seconds }[xKind];
}

/** Share of the chart's height: marks at the same position are stacked, so that each can be clicked. */
const SHIFT = 0.055;
/** Share of the chart's width: of closer marks of one kind, only the newest is drawn; a zoom shows the others. */
const CLOSEST = 0.012;

/** One trace of marks for each kind. `chart`: the loss chart as built; `eventsOf`: a run's events, newest last. */
export function markTraces(chart, eventsOf, hiddenKinds, xKind, unit, range) {
  const traces = new Map();
  const [bottom, top] = chart.yRange || [0, 1];
  for (const line of chart.lines) {
    const places = [...line.x.keys()].filter((place) => isNumber(line.y[place]));
    if (!places.length) continue;
    const atSamePlace = new Map();
    const events = eventsOf(line.run.id).filter((event) => !hiddenKinds.has(event.event));
    for (const { event, x, numNear } of thinned(events, xKind, unit, range)) {
      const below = atSamePlace.get(x) || 0;
      atSamePlace.set(x, below + 1);
      const shift = below * SHIFT * (top - bottom);
      const height = heightAt(line, places, x);
      if (!traces.has(event.event)) traces.set(event.event, traceOf(event));
      const trace = traces.get(event.event);
      const near = numNear ? `, and ${numNear} more close by` : "";
      trace.x.push(x);
      trace.y.push(chart.isLog ? height * 10 ** shift : height + shift);
      trace.text.push(plotlyText(`step ${event.step}: ${event.title}${near}`));
      trace.customdata.push([line.run.id, event.number]);
    }
  }
  const order = Object.keys(KINDS);
  return [...traces.values()].sort((one, other) => order.indexOf(one.meta.kind) - order.indexOf(other.meta.kind));
}

/** The events within the range, in drawn units, oldest first. */
function thinned(events, xKind, unit, [from, to]) {
  const newest = new Map();
  const kept = [];
  for (const event of [...events].reverse()) {
    const place = xOf(event, xKind);
    const x = place / unit.factor;
    if (!isNumber(place) || x < from || x > to) continue;
    const last = newest.get(event.event);
    if (last && Math.abs(last.x - x) < CLOSEST * (to - from)) last.numNear += 1;
    else {
      newest.set(event.event, { event, x, numNear: 0 });
      kept.push(newest.get(event.event));
    }
  }
  return kept.reverse();
}

function traceOf(event) {
  const kind = kindOf(event);
  const edge = { width: 1.5, color: css(kind.isOpen ? kind.colour : "--panel") };
  return {
    type: "scatter", mode: "markers", x: [], y: [], text: [], customdata: [], showlegend: false, cliponaxis: false,
    name: plotlyText(kind.word), meta: { part: "marks", kind: event.event },
    marker: { symbol: kind.symbol, size: kind === KINDS.done ? 13 : 11, color: css(kind.colour), line: edge },
    hovertemplate: "%{text}<extra>%{fullData.name}</extra>",
  };
}

/** Interpolated; outside the curve, the value of the nearest end. `places`: points with a value. */
function heightAt(line, places, x) {
  if (!places.length) return null;
  let low = 0;
  let high = places.length - 1;
  if (x <= line.x[places[low]]) return line.y[places[low]];
  if (x >= line.x[places[high]]) return line.y[places[high]];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (line.x[places[middle]] <= x) low = middle;
    else high = middle;
  }
  const [before, after] = [places[low], places[high]];
  const share = (x - line.x[before]) / (line.x[after] - line.x[before] || 1);
  return line.y[before] + share * (line.y[after] - line.y[before]);
}
