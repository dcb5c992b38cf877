// From curves to Plotly's input: traces, legend, ranges and the text alternative of a chart.

import { figure, isNumber, plotlyText } from "./format.js";
import { colour, css, dash, dashOfRound, faint, lineSymbol } from "./palette.js";
import { smooth } from "./smooth.js";

/** With more lines than this, the faint raw curves are left out. */
const MOST_RAW_LINES = 6;

/**
 * One chart of the visible runs, or null if none of them has data for it.
 * `board`: {runs, curves, domains, restartsOf, hiddenLines}; `range`: [from, to] in drawn units; `unit`: {factor} from
 * x to drawn units.
 */
export function buildChart(chart, board, view, range, unit) {
  const runs = board.runs.filter((run) => !chart.onlyRun || run.id === chart.onlyRun);
  const found = runs.flatMap((run) => linesOf(chart, run, board, view, unit));
  if (!found.length) return null;
  const labels = chart.byDomain ? ["all", ...board.domains] : [...new Set(found.map((line) => line.label))];
  const seen = found.filter((line) => !board.hiddenLines.has(chart.id, line.label));
  const isColourOfRun = runs.length > 1;
  const traces = [];
  for (const line of found) {
    line.place = labels.indexOf(line.label) - (chart.byDomain ? 1 : 0);
    line.colour = isColourOfRun ? colour(line.run.number) : colourOfLabel(line, labels, chart);
    line.dash = isColourOfRun ? Math.max(0, line.place + (chart.byDomain ? 1 : 0)) : dashOfRound(line.place);
    if (seen.includes(line)) traces.push(...tracesOf(chart, line, seen.length, runs, unit));
  }
  const isLog = Boolean(chart.isLog || (view.log && chart.hasLog));
  const { ends, isCut } = yRange(chart, seen, range, isLog);
  const isOff = (label) => board.hiddenLines.has(chart.id, label);
  return {
    ...chart, traces, isLog, lines: found, yRange: ends,
    unit: isCut ? `${chart.unit}, highest peaks cut off` : chart.unit,
    legend: legendOf(found, labels, isColourOfRun, isOff), words: wordsOf(chart, found, view.x, runs.length > 1),
  };
}

function linesOf(chart, run, board, view, unit) {
  const have = board.curves.of(run.id);
  if (!have) return [];
  const gaps = view.x === "time" ? board.restartsOf(run.id).map((seconds) => seconds / unit.factor) : [];
  return chart.lines(run).flatMap(({ series, label, isOver, points }) => {
    const isLater = Boolean(points?.step.length);
    const curve = isLater ? curveOf(points, view.x) : have.lines.get(series);
    if (!curve?.x.length || !(isLater || board.curves.hasFigures(run.id, series))) return [];
    const drawn = withGaps(dense(curve, chart, unit), gaps);
    return [{ ...drawn, run, series, label, isOver, window: chart.isSmoothed ? view.window : 1 }];
  });
}

/** The points of an evaluation whose position is known. */
function curveOf(points, xKind) {
  const xs = points[{ step: "step", tokens: "tokens", time: "seconds" }[xKind]];
  const places = [...xs.keys()].filter((place) => isNumber(xs[place]));
  const values = places.map((place) => points.value[place]);
  return { x: places.map((place) => xs[place]), weight: places.map(() => 1), mean: values, min: values, max: values };
}

/** Adds gaps for the time when a run was stopped. At both ends of the gap, so that a stack falls to 0 there. */
function withGaps(line, gaps) {
  const names = Object.keys(line);
  const broken = Object.fromEntries(names.map((name) => [name, []]));
  let next = 0;
  for (const [place, x] of line.x.entries()) {
    while (next < gaps.length && place > 0 && gaps[next] <= line.x[place - 1]) next += 1;
    if (place > 0 && next < gaps.length && gaps[next] <= x) {
      const before = line.x[place - 1];
      for (const share of [0.001, 0.999]) {
        for (const name of names) broken[name].push(name === "x" ? before + share * (x - before) : null);
      }
    }
    for (const name of names) broken[name].push(line[name][place]);
  }
  return broken;
}

/** The curve in drawn units; of a sparse curve only the steps with a value, so that its line is not interrupted. */
function dense(curve, chart, unit) {
  const scale = chart.scale || 1;
  const places = [...curve.x.keys()].filter((place) => !chart.isSparse || isNumber(curve.mean[place]));
  const pick = (values, factor) => places.map((place) => (isNumber(values[place]) ? values[place] * factor : null));
  return {
    x: pick(curve.x, 1 / unit.factor), weight: pick(curve.weight, 1),
    raw: pick(curve.mean, scale), low: pick(curve.min, scale), high: pick(curve.max, scale),
  };
}

function colourOfLabel(line, labels, chart) {
  if (chart.isStack && line.isOver) return css("--ink");
  if (chart.byDomain) return line.place < 0 ? css("--ink") : colour(line.place);
  return labels.length === 1 ? colour(line.run.number) : colour(line.place);
}

function tracesOf(chart, line, numLines, runs, unit) {
  const isSmooth = line.window > 1;
  line.y = isSmooth ? smooth(line.raw, line.weight, line.window) : line.raw;
  const name = plotlyText(runs.length > 1 ? `${line.run.name} ${line.label}` : line.label);
  const base = { type: "scatter", x: line.x, name, showlegend: false };
  const meta = (part) => ({ run: line.run.id, series: line.series, part });
  const stroke = { color: line.colour, width: 1.75, dash: dash(line.dash) };
  if (chart.isStack && !line.isOver) {
    const y = line.y.map((value) => value ?? 0);
    const fill = { stackgroup: "time", fillcolor: faint(line.colour, 0.65) };
    const looks = { mode: y.length < 2 ? "lines+markers" : "lines", line: { color: line.colour, width: 0.5 } };
    return [{ ...base, y, ...looks, ...fill, marker: { color: line.colour, size: 5 }, meta: meta("stack") }];
  }
  const traces = [];
  if (chart.hasBand && line.weight.some((weight) => weight > 1)) {
    traces.push({
      ...base, mode: "lines", hoverinfo: "skip", line: { width: 0 }, fill: "toself", meta: meta("band"),
      fillcolor: faint(line.colour, 0.13), ...bandOf(line),
    });
  }
  if (isSmooth && numLines <= MOST_RAW_LINES && !line.isOver) {
    traces.push({
      ...base, y: line.raw, mode: "lines", hoverinfo: "skip", opacity: 0.3, line: { ...stroke, width: 1 },
      meta: meta("raw"),
    });
  }
  const symbol = lineSymbol(line.dash);
  const isDotted = chart.isSparse || symbol || isDot(line.y);
  const floored = (value) => (isNumber(value) ? Math.max(value, chart.floor) : value);
  const value = `%{customdata:${chart.tickFormat || ".4~g"}}`;
  traces.push({
    ...base, y: chart.floor ? line.y.map(floored) : line.y, customdata: line.y, line: stroke,
    mode: isDotted ? "lines+markers" : "lines",
    meta: meta(isSmooth ? "smooth" : "raw"),
    marker: { color: line.colour, size: symbol ? 7 : 5, symbol: symbol || "circle", maxdisplayed: symbol ? 15 : 60 },
    hovertemplate: `${chart.isCrowded ? `${unit.hover}: ` : ""}${value}<extra>%{fullData.name}</extra>`,
  });
  return traces;
}

/** Whether a line through these points would be invisible. */
export function isDot(values) {
  return values.filter(isNumber).length < 2;
}

/** One closed shape per part without a gap. */
function bandOf(line) {
  const [x, y] = [[], []];
  let part = [];
  for (const place of [...line.x.keys(), null]) {
    if (place !== null && line.low[place] !== null && line.high[place] !== null) part.push(place);
    else if (part.length && (place === null || line.weight[place] === null)) {
      const back = [...part].reverse();
      x.push(...[...part, ...back].map((one) => line.x[one]), null);
      y.push(...part.map((one) => line.high[one]), ...back.map((one) => line.low[one]), null);
      part = [];
    }
  }
  return { x: x.slice(0, -1), y: y.slice(0, -1) };
}

/** {ends, isCut} of the values within the x range: Plotly's own range would include values outside. */
function yRange(chart, lines, [from, to], isLog) {
  let low = Infinity;
  let high = -Infinity;
  const see = (seen) => {
    if (!isNumber(seen)) return;
    const value = chart.floor ? Math.max(seen, chart.floor) : seen;
    if (isLog && value <= 0) return;
    low = Math.min(low, value);
    high = Math.max(high, value);
  };
  const stacked = new Map();
  for (const line of lines) {
    for (const [place, x] of line.x.entries()) {
      if (x < from || x > to) continue;
      if (chart.isStack && !line.isOver) stacked.set(x, (stacked.get(x) || 0) + (line.y[place] || 0));
      else see(line.y[place]);
      if (!chart.isStack && lines.length <= MOST_RAW_LINES) see(line.raw[place]);
      if (chart.hasBand && line.weight[place] > 1) [line.low[place], line.high[place]].forEach(see);
    }
  }
  for (const sum of stacked.values()) see(sum);
  if (low > high) return { ends: null, isCut: false };
  const highest = high;
  if (chart.isStack) high = withoutPeaks([...stacked.values()], high);
  const isCut = high < highest;
  if (isLog) [low, high] = [Math.log10(low), Math.log10(high)];
  else if (chart.fromZero) low = Math.min(0, low);
  else if (chart.hasZero) [low, high] = [Math.min(0, low), Math.max(0, high)];
  const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return { ends: [chart.fromZero && !isLog && low === 0 ? 0 : low - pad, high + pad], isCut };
}

/** Cuts off the highest peaks: a first step or a checkpoint can take the time of a hundred steps. */
function withoutPeaks(sums, high) {
  const usual = sums.sort((one, other) => one - other)[Math.floor(0.95 * (sums.length - 1))];
  return usual && high > 2 * usual ? 1.5 * usual : high;
}

/** With several runs: the colour of each run, then the dash of each label in grey. */
function legendOf(lines, labels, isColourOfRun, isOff) {
  const entries = new Map();
  if (isColourOfRun) {
    for (const line of lines) entries.set(`run ${line.run.id}`, { text: line.run.name, colour: line.colour, dash: 0 });
    if (new Set(lines.map((line) => line.label)).size < 2) return [...entries.values()];
  }
  const inOrder = [...lines].sort((one, other) => labels.indexOf(one.label) - labels.indexOf(other.label));
  for (const line of inOrder) {
    const entry = { text: line.label, colour: isColourOfRun ? css("--quiet") : line.colour, dash: line.dash };
    entries.set(`label ${line.label}`, { ...entry, label: line.label, isOff: isOff(line.label) });
  }
  return [...entries.values()];
}

function wordsOf(chart, lines, xKind, hasMany) {
  const last = lines.slice(0, 12).map((line) => {
    const value = line.raw.filter(isNumber).at(-1);
    return `${hasMany ? `${line.run.name} ` : ""}${line.label} ${figure(value)}`;
  });
  return `${chart.title} over ${xKind}, last values: ${last.join(", ")}`;
}
