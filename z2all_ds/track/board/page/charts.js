// The charts on the page: one card each, all with the same x range.

import { showTrouble } from "./api.js";
import { keyed, make, makeSvg, setText } from "./dom.js";
import { oneLine } from "./format.js";
import { isLoaded, load } from "./library.js";
import { kindOf, signOf } from "./marks.js";
import { css, dash, lineSymbol } from "./palette.js";
import { MARGIN, sketch } from "./sketch.js";

/** Of a line of length 22, as Plotly draws the same names. */
const DASH_ARRAYS = {
  solid: "", dash: "6 3", dot: "2 2.5", longdash: "9 3", dashdot: "6 2.5 2 2.5", longdashdot: "9 2.5 2 2.5",
};
const SMALL_SIGNS = {
  circle: "M11 2a3 3 0 1 0 .01 0z", square: "M8 2h6v6h-6z", diamond: "M11 1l4 4-4 4-4-4z",
  "triangle-up": "M11 1l4 7h-8z", cross: "M10 1h2v3h3v2h-3v3h-2v-3h-3v-2h3z", x: "M8 2l6 6m0-6l-6 6",
};
/** A drag on a touch screen scrolls the page; there are buttons for zooming. */
const DRAG_MODE = matchMedia("(pointer: coarse)").matches ? false : "zoom";

/** A legend with more names is small and below the chart; above, it would push the chart down. */
const MANY_LABELS = 8;
/** Largest distance in pixels of a click on a mark. */
const MARK_PIXELS = 12;
/** Time for the browser to paint; animation frames stop while the page is hidden. */
const SHOW_MILLISECONDS = 40;
const AGAIN_MILLISECONDS = 2000;
const CONFIG = { displayModeBar: false, responsive: true, doubleClick: false, showTips: false, scrollZoom: false };

export class Charts {
  #holder;
  #on;
  #isHeld = false;
  #isDrawing = false;
  /** {charts, axis, isLaidOut} of the last requested drawing. */
  #newest = { charts: [], isLaidOut: true };
  /** Ids of its charts that are not drawn yet. */
  #left = new Set();
  /** Position on the page of the chart being drawn. */
  #reached = 0;

  /** `on`: {zoom([from, to]), reset(), mark(runId, number), toggle(chartId, label), only(chartId, label, labels)}. */
  constructor(holder, on) {
    this.#holder = holder;
    this.#on = on;
    // Redrawing during a drag would end the drag.
    holder.addEventListener("pointerdown", () => (this.#isHeld = true));
    for (const end of ["pointerup", "pointercancel"]) addEventListener(end, () => this.#letGo());
  }

  /**
   * `charts`: the results of buildChart; `axis`: {range, title}. `isWish`: the user has changed the view, so drawing
   * starts again at the first chart. New data alone does not restart it: with many live runs, data arrives faster than
   * all charts are drawn, and the last charts would never be reached.
   */
  draw(charts, axis, isWish) {
    this.#newest = { charts, axis, isLaidOut: false };
    this.#left = new Set(charts.map(({ id }) => id));
    if (isWish) this.#reached = 0;
    return this.#goOn();
  }

  /** One after the other, so that key presses are handled in between. */
  async #goOn() {
    if (this.#isHeld) return;
    this.#layOut();
    if (this.#isDrawing || !this.#left.size) return;
    this.#isDrawing = true;
    try {
      if (!isLoaded()) await this.#loadLibrary();
      while (this.#left.size && !this.#isHeld) {
        this.#layOut();
        this.#drawNext();
        await pause();
      }
    } finally {
      this.#isDrawing = false;
    }
    if (!this.#left.size) this.#reached = 0;
  }

  /** A card for each chart, with a sketch until the library is loaded. */
  #layOut() {
    if (this.#newest.isLaidOut) return;
    const { charts, axis } = this.#newest;
    this.#newest.isLaidOut = true;
    const leaving = new Set([...this.#holder.children].map((card) => card.dataset.key));
    for (const chart of charts) leaving.delete(chart.id);
    if (isLoaded()) for (const id of leaving) Plotly.purge(this.#plotOf(id));
    keyed(this.#holder, charts, (chart) => chart.id, createCard, (card, chart) => fillCard(card, chart, this.#on));
    if (!isLoaded()) for (const chart of charts) sketch(this.#plotOf(chart.id), chart, axis.range);
  }

  /** The next remaining chart on the page; after the last, the first. */
  #drawNext() {
    const { charts, axis } = this.#newest;
    const isLeft = ({ id }) => this.#left.has(id);
    const chart = charts.slice(this.#reached).find(isLeft) || charts.find(isLeft);
    this.#reached = charts.indexOf(chart) + 1;
    this.#left.delete(chart.id);
    const plot = this.#plotOf(chart.id);
    const isNew = !plot.on;
    if (isNew) plot.replaceChildren();
    Plotly.react(plot, chart.traces, layoutOf(chart, axis), CONFIG);
    if (isNew) this.#listenTo(plot);
  }

  /** The library blocks the page for a while: sketches are shown before. */
  async #loadLibrary() {
    await pause(SHOW_MILLISECONDS);
    while (!isLoaded()) {
      try {
        await load();
      } catch (error) {
        showTrouble(error);
        await pause(AGAIN_MILLISECONDS);
      }
    }
  }

  #plotOf(id) {
    return [...this.#holder.children].find((card) => card.dataset.key === id).querySelector(".plot");
  }

  #letGo() {
    if (!this.#isHeld) return;
    this.#isHeld = false;
    // After Plotly has ended the drag, which may change the range.
    setTimeout(() => this.#goOn());
  }

  /** After the first drawing, when Plotly has added `on` to the element. */
  #listenTo(plot) {
    plot.on("plotly_relayout", (change) => {
      const [from, to] = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      if (from !== undefined && to !== undefined) {
        this.#left.clear();
        this.#on.zoom([Number(from), Number(to)]);
      }
    });
    plot.on("plotly_doubleclick", () => this.#on.reset());
    plot.addEventListener("click", (click) => {
      const mark = markAt(plot, click);
      if (mark) this.#on.mark(...mark);
    });
  }
}

function pause(milliseconds = 0) {
  return new Promise((resolve) => setTimeout(resolve, milliseconds));
}

/** By the distance on the screen: Plotly reports a click on the hovered item, which may be the curve below a mark. */
function markAt(plot, { clientX, clientY }) {
  const area = plot.querySelector(".nsewdrag").getBoundingClientRect();
  const { xaxis, yaxis } = plot.layout;
  const share = (value, [from, to]) => (value - from) / (to - from);
  let found = null;
  let nearest = MARK_PIXELS;
  for (const trace of plot.data.filter(({ meta }) => meta.part === "marks")) {
    for (const [place, mark] of trace.customdata.entries()) {
      const height = yaxis.type === "log" ? Math.log10(trace.y[place]) : trace.y[place];
      const left = area.left + area.width * share(trace.x[place], xaxis.range);
      const top = area.bottom - area.height * share(height, yaxis.range);
      const distance = Math.hypot(left - clientX, top - clientY);
      if (distance < nearest) [nearest, found] = [distance, mark];
    }
  }
  return found;
}

function createCard(chart) {
  return make(
    "section",
    { className: `card${chart.isWide ? " wide" : ""}`, "aria-label": chart.title },
    make("h2", {}, chart.title, make("span", { className: "unit" })),
    make("ul", { className: "legend" }),
    make("div", { className: "plot", role: "img", tabIndex: 0 }),
  );
}

function fillCard(card, chart, on) {
  setText(card.querySelector(".unit"), chart.unit);
  const plot = card.querySelector(".plot");
  if (plot.getAttribute("aria-label") !== chart.words) plot.setAttribute("aria-label", chart.words);
  const legend = card.querySelector(".legend");
  const isNeeded = chart.legend.length > 1;
  const keyOf = (entry) => `${entry.kind} ${entry.colour} ${entry.dash} ${entry.text}`;
  const signFor = (entry) => (entry.kind ? signOf(kindOf({ event: entry.kind })) : swatch(entry));
  const labels = chart.legend.filter(({ label }) => label !== undefined).map(({ label }) => label);
  const create = (entry) => {
    if (entry.label === undefined || labels.length < 2) return make("li", {}, signFor(entry), oneLine(entry.text));
    const title = "Show or hide this line; double click: only this one, or all";
    const button = make("button", { type: "button", title, value: entry.label }, signFor(entry), oneLine(entry.text));
    button.addEventListener("click", () => on.toggle(chart.id, entry.label));
    button.addEventListener("dblclick", () => on.only(chart.id, entry.label, namesIn(legend)));
    return make("li", {}, button);
  };
  keyed(legend, isNeeded ? chart.legend : [], keyOf, create, (item, entry) => {
    item.querySelector("button")?.setAttribute("aria-pressed", String(!entry.isOff));
  });
  card.classList.toggle("crowded", labels.length > MANY_LABELS);
}

function namesIn(legend) {
  return [...legend.querySelectorAll("button")].map((button) => button.value);
}

function swatch({ colour, dash: number }) {
  const line = makeSvg("path", {
    d: "M0 5h22", stroke: colour, "stroke-width": "2.5", "stroke-dasharray": DASH_ARRAYS[dash(number)],
  });
  const picture = makeSvg("svg", { viewBox: "0 0 22 10", width: "22", height: "10", "aria-hidden": "true" }, line);
  const symbol = lineSymbol(number);
  if (symbol) picture.append(makeSvg("path", { d: SMALL_SIGNS[symbol], fill: colour, stroke: colour }));
  return picture;
}

function layoutOf(chart, axis) {
  const ink = css("--quiet");
  const line = { color: ink, gridcolor: css("--grid"), zeroline: false, linecolor: css("--grid"), automargin: true };
  return {
    autosize: true,
    margin: MARGIN,
    paper_bgcolor: css("--panel"),
    plot_bgcolor: css("--panel"),
    font: { family: css("--font"), size: 12, color: ink },
    hovermode: chart.isCrowded ? "closest" : "x unified",
    hoverlabel: {
      bgcolor: css("--panel"), bordercolor: css("--edge"), font: { color: css("--ink"), size: 12 }, namelength: 40,
    },
    dragmode: DRAG_MODE,
    showlegend: false,
    xaxis: {
      ...line, range: axis.range, autorange: false, exponentformat: "B", nticks: 8, showgrid: false, ticks: "outside",
      title: { text: axis.title, standoff: 6, font: { size: 12 } }, separatethousands: true,
      unifiedhovertitle: { text: axis.hover },
      spikecolor: css("--edge"), spikethickness: 1, spikedash: "solid",
    },
    yaxis: {
      ...line, type: chart.isLog ? "log" : "linear", fixedrange: true, tickformat: chart.tickFormat,
      exponentformat: chart.tickExponent || "B", nticks: 7, ...(chart.isLog ? logTicks(chart.yRange) : {}),
      ...(chart.hasZero ? { zeroline: true, zerolinecolor: ink, zerolinewidth: 1 } : {}),
      ...(chart.yRange ? { range: chart.yRange, autorange: false } : { autorange: true }),
    },
  };
}

/** Powers of ten, or round numbers: Plotly's own ticks are single digits without their power of ten. */
function logTicks(range) {
  if (!range) return {};
  if (range[1] - range[0] > 3) return { dtick: Math.ceil((range[1] - range[0]) / 7) };
  const steps = range[1] - range[0] > 1.2 ? [1, 2, 5] : range[1] - range[0] > 0.5 ? [1, 1.5, 2, 3, 4, 5, 7] : null;
  const values = [];
  if (steps) {
    for (let power = Math.floor(range[0]); power <= range[1]; power++) {
      for (const step of steps) values.push(step * 10 ** power);
    }
  } else {
    const [low, high] = range.map((end) => 10 ** end);
    const rough = (high - low) / 5;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
    for (let number = Math.ceil(low / step); number * step <= high; number++) values.push(number * step);
  }
  return { tickvals: values, ticktext: values.map((value) => String(Number(value.toPrecision(4)))) };
}
