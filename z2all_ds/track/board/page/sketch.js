// A first sketch of a chart: the chart library has megabytes, which take time to load over a slow connection and a
// second or two to start. It has curves, and numbers at the ends of both axes; the library draws over it later.

import { makeSvg } from "./dom.js";
import { count, figure, isNumber } from "./format.js";
import { isDot } from "./traces.js";

/** Margins in pixels, as the library has them. */
export const MARGIN = { l: 54, r: 14, t: 8, b: 34, pad: 2 };
/** Of the inner image, which is stretched to the available space. */
const SIZE = 1000;

/** `chart`: the result of buildChart; `xRange`: [from, to] in drawn units. */
export function sketch(plot, chart, xRange) {
  const [width, height] = [plot.clientWidth - MARGIN.l - MARGIN.r, plot.clientHeight - MARGIN.t - MARGIN.b];
  if (!chart.yRange || width <= 0 || height <= 0) return;
  const place = {
    x: (value) => SIZE * share(value, xRange),
    y: (value) => SIZE * (1 - share(chart.isLog ? Math.log10(value) : value, chart.yRange)),
  };
  const frame = { x: MARGIN.l, y: MARGIN.t, width, height, viewBox: `0 0 ${SIZE} ${SIZE}`, preserveAspectRatio: "none" };
  const curves = chart.traces.filter(({ meta }) => meta.part !== "marks" && meta.part !== "stack");
  const paths = [...stackPaths(chart, place), ...curves.map((trace) => pathOf(trace, place))];
  const picture = makeSvg("svg", { class: "sketch", "aria-hidden": "true" }, makeSvg("svg", frame, ...paths));
  const [low, high] = chart.isLog ? chart.yRange.map((end) => 10 ** end) : chart.yRange;
  picture.append(
    words(MARGIN.l - 4, MARGIN.t + 10, "end", figure(high)),
    words(MARGIN.l - 4, MARGIN.t + height, "end", figure(low)),
    words(MARGIN.l, MARGIN.t + height + 16, "start", count(Math.max(0, xRange[0]))),
    words(MARGIN.l + width, MARGIN.t + height + 16, "end", count(xRange[1])),
  );
  plot.replaceChildren(picture);
}

function share(value, [from, to]) {
  return (value - from) / (to - from);
}

function pathOf({ x, y, line, marker, fill, fillcolor, opacity }, place) {
  if (marker && isDot(y)) return dotOf(x, y, marker, place);
  const looks = fill
    ? { fill: fillcolor, stroke: "none" }
    : { fill: "none", stroke: line.color, "stroke-width": line.width, opacity: opacity ?? 1 };
  return makeSvg("path", { d: outline(x, y, place), "vector-effect": "non-scaling-stroke", ...looks });
}

/** A line of length zero with round ends: a circle would be stretched with the image. */
function dotOf(x, y, { color, size }, place) {
  const looks = { stroke: color, "stroke-width": size, "stroke-linecap": "round" };
  const path = outline(x, y, place);
  return makeSvg("path", { d: path && `${path}h0`, "vector-effect": "non-scaling-stroke", ...looks });
}

/** Each layer from the sum of the layers below it to the sum including it. */
function stackPaths(chart, place) {
  const sums = new Map();
  const stacked = chart.traces.filter(({ meta }) => meta.part === "stack");
  return stacked.map(({ x, y, marker, fillcolor }) => {
    const below = x.map((at) => sums.get(at) || 0);
    for (const [number, at] of x.entries()) sums.set(at, below[number] + y[number]);
    if (x.length < 2) return dotOf(x, x.map((at) => sums.get(at)), marker, place);
    const around = outline([...x, ...[...x].reverse()], [...below, ...x.map((at) => sums.get(at)).reverse()], place);
    return makeSvg("path", { d: around, fill: fillcolor, stroke: "none" });
  });
}

/** A path through these points, interrupted at missing values. */
function outline(xs, ys, place) {
  let isDown = false;
  let path = "";
  for (const [number, x] of xs.entries()) {
    const [left, top] = isNumber(x) && isNumber(ys[number]) ? [place.x(x), place.y(ys[number])] : [NaN, NaN];
    const isSeen = isNumber(left) && isNumber(top);
    if (isSeen) path += `${isDown ? "L" : "M"}${left.toFixed(1)} ${top.toFixed(1)}`;
    isDown = isSeen;
  }
  return path;
}

function words(x, y, anchor, text) {
  const element = makeSvg("text", { x, y, "text-anchor": anchor });
  element.textContent = text;
  return element;
}
