// The board's page: asks the server for news every two seconds, and draws what has changed.

import { ask, hideTrouble, showTrouble } from "./api.js";
import { padded, panned, unitOf, wholeRange, within, zoomed } from "./axis.js";
import { chartsFor, seriesOf } from "./chart_list.js";
import { Charts } from "./charts.js";
import { Curves } from "./curves.js";
import { closeDetails, openDetails, prepareDetails } from "./details.js";
import { Differences } from "./differences.js";
import { find, setText } from "./dom.js";
import { Events } from "./events.js";
import { healthOf, tellAge } from "./health.js";
import { listenToKeys } from "./keys.js";
import { kindOf, markTraces } from "./marks.js";
import { mixtureOf } from "./mixture.js";
import { HiddenLines } from "./hidden_lines.js";
import { isDark, onSchemeChange } from "./palette.js";
import { probesOf, withProbeLists } from "./probes.js";
import { showRuns } from "./runs.js";
import { Tables } from "./tables.js";
import { buildChart } from "./traces.js";
import { readHash, sliderOfWindow, view, windowOfSlider, writeHash, X_KINDS } from "./view.js";

const EVERY_SECONDS = Math.max(0.1, Number(new URLSearchParams(location.search).get("every")) || 2);

let runs = [];
let drawnUnit = { factor: 1 };
/** Charts are redrawn only if this changes: a hover label stays, and an idle board costs nothing. */
let drawnKey = "";
/** The view at the last drawing. */
let drawnWish = "";
let isDrawWanted = false;
let timer = null;

const curves = new Curves(wantDraw);
const events = new Events(wantDraw);
const differences = new Differences();
const health = new Tables("health", "health", (run) => [run.health_records, run.history], healthOf, tellAge);
const mixture = new Tables("mixture", "data", (run) => [run.records, run.history], mixtureOf);
const probes = new Tables("probes", "probes", probesKey, probesOf);
const hiddenLines = new HiddenLines();
const charts = new Charts(find("charts"), {
  zoom: (ends) => {
    drawnKey = ""; // this chart has moved already, so all are redrawn even if the view stays the same
    setZoom(within(ends.map((end) => end * drawnUnit.factor), allOfX()));
  },
  reset: () => setZoom(null),
  mark: (runId, number) => {
    const run = runs.find(({ id }) => id === runId);
    const event = events.of(runId).find((one) => one.number === number);
    if (run && event) openDetails(run, event);
  },
  toggle: (chartId, label) => {
    hiddenLines.toggle(chartId, label);
    wantDraw();
  },
  only: (chartId, label, labels) => {
    hiddenLines.only(chartId, label, labels);
    wantDraw();
  },
});

/** A run without probes is not asked about them when it has new records. */
function probesKey(run) {
  return [run.history, run.events, run.evaluations, run.probes.length ? run.records : 0];
}

function shownRuns() {
  return runs.filter((run) => !view.hidden.has(run.name));
}

function allOfX() {
  return wholeRange(shownRuns().filter((run) => run.records), curves, events, view.x);
}

// Asking

async function look() {
  clearTimeout(timer);
  try {
    if (!document.hidden) {
      const answer = await ask("/api/runs");
      runs = answer.runs.map((run, number) => ({ ...run, number }));
      hideTrouble();
      wantDraw();
      fetchWhatChanged();
    }
  } catch (error) {
    showTrouble(error);
  }
  clearTimeout(timer);
  if (!view.paused) timer = setTimeout(look, 1000 * EVERY_SECONDS);
}

function fetchWhatChanged() {
  const shown = shownRuns();
  for (const run of shown) {
    curves.update(run, seriesOf(run), view);
    events.update(run);
    health.update(run, wantDraw);
    mixture.update(run, wantDraw);
    probes.update(run, wantDraw);
  }
  differences.update(shown);
}

// Drawing

function wantDraw() {
  if (isDrawWanted) return;
  isDrawWanted = true;
  // A timer, since animation frames stop while the page is hidden.
  setTimeout(() => {
    isDrawWanted = false;
    draw();
  });
}

function draw() {
  const shown = shownRuns();
  showRuns(runs, view.hidden, toggle);
  drawControls();
  drawCharts(shown);
  events.show(shown);
  health.show(shown, wantDraw);
  mixture.show(shown, wantDraw);
  probes.show(shown, wantDraw);
  const nothing = find("nothing");
  nothing.hidden = shown.some((run) => run.records);
  const words = shown.length ? "No records yet. Curves appear with the first step." : "All runs are hidden.";
  setText(nothing, runs.length ? words : "Loading\u2026");
}

function drawCharts(shown) {
  const withRecords = shown.filter((run) => run.records);
  // Curves of another x axis than the chosen one: the old charts stay until the new curves arrive.
  if (withRecords.some((run) => curves.of(run.id) && curves.of(run.id).x !== view.x)) return;
  const { x, log, window, zoom } = view;
  const versions = [curves.version, events.version, probes.version];
  const chosen = [[...events.hiddenKinds], [...view.hidden], hiddenLines.version, x, log, window, zoom, isDark()];
  const wish = JSON.stringify(chosen);
  const key = JSON.stringify([versions, wish, withRecords.map((run) => [run.id, run.name])]);
  if (key === drawnKey) return;
  const isWish = wish !== drawnWish || !drawnKey;
  [drawnKey, drawnWish] = [key, wish];
  const all = allOfX();
  drawnUnit = unitOf(view.x, all);
  const range = (view.zoom || padded(all)).map((end) => end / drawnUnit.factor);
  const domains = [...new Set(runs.flatMap((run) => run.domains))].sort();
  const withProbes = withProbeLists(withRecords, (runId) => probes.of(runId)?.probes || []);
  const board = { runs: withProbes, curves, domains, restartsOf: (runId) => events.restartsOf(runId), hiddenLines };
  const built = chartsFor(withProbes)
    .map((chart) => buildChart(chart, board, view, range, drawnUnit))
    .filter(Boolean);
  for (const chart of built.filter(({ hasMarks }) => hasMarks)) {
    const eventsOf = (runId) => events.of(runId);
    const marks = markTraces(chart, eventsOf, events.hiddenKinds, view.x, drawnUnit, range);
    chart.traces.push(...marks);
    chart.legend.push(...marks.map(({ meta }) => ({ kind: meta.kind, text: kindOf({ event: meta.kind }).word })));
  }
  charts.draw(built, { range, ...drawnUnit }, isWish);
}

function drawControls() {
  for (const radio of document.querySelectorAll("input[name=x]")) radio.checked = radio.value === view.x;
  find("log-axis").checked = view.log;
  const slider = find("smoothing");
  if (windowOfSlider(Number(slider.value)) !== view.window) slider.value = sliderOfWindow(view.window);
  setText(find("smoothing-words"), view.window > 1 ? `${view.window} steps` : "off");
  find("zoom-reset").disabled = find("pan-left").disabled = find("pan-right").disabled = !view.zoom;
  find("live").setAttribute("aria-pressed", String(!view.paused));
  setText(find("live"), view.paused ? "Paused" : "Live");
}

// User actions

/** `isFetched`: the action needs other data from the server. */
function changed(isFetched) {
  writeHash();
  wantDraw();
  if (isFetched) fetchWhatChanged();
}

function setZoom(zoom) {
  view.zoom = zoom;
  changed(true);
}

function setX(kind) {
  view.x = kind;
  view.zoom = null;
  changed(true);
}

function toggle(run) {
  if (!view.hidden.delete(run.name)) view.hidden.add(run.name);
  changed(true);
}

function setLog(isLog) {
  view.log = isLog;
  changed(false);
}

function pause() {
  view.paused = !view.paused;
  wantDraw();
  if (!view.paused) look();
}

const zoomBy = (factor) => setZoom(zoomed(view.zoom || padded(allOfX()), factor, allOfX()));
const panBy = (share) => view.zoom && setZoom(panned(view.zoom, share, allOfX()));

function listen() {
  for (const radio of document.querySelectorAll("input[name=x]")) {
    radio.addEventListener("change", () => setX(radio.value));
  }
  find("log-axis").addEventListener("change", (event) => setLog(event.target.checked));
  find("smoothing").addEventListener("input", (event) => {
    view.window = windowOfSlider(Number(event.target.value));
    changed(false);
  });
  const buttons = {
    "zoom-in": () => zoomBy(0.5), "zoom-out": () => zoomBy(2), "zoom-reset": () => setZoom(null),
    "pan-left": () => panBy(-0.25), "pan-right": () => panBy(0.25),
    live: pause, "help-button": () => find("help").showModal(),
  };
  for (const [id, action] of Object.entries(buttons)) find(id).addEventListener("click", action);
  listenToKeys({
    run: (number) => runs[number] && toggle(runs[number]),
    log: () => setLog(!view.log),
    nextX: () => setX(X_KINDS[(X_KINDS.indexOf(view.x) + 1) % X_KINDS.length]),
    pause,
    reset: () => setZoom(null),
    zoom: zoomBy,
    pan: panBy,
    help: () => find("help").showModal(),
    escape: closeDetails,
  });
  addEventListener("hashchange", () => {
    readHash();
    changed(true);
  });
  document.addEventListener("visibilitychange", () => !document.hidden && !view.paused && look());
  onSchemeChange(wantDraw);
}

readHash();
prepareDetails();
listen();
draw();
look();
