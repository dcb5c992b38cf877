// The panel with all details of one event.

import { find, headRow, make } from "./dom.js";
import { duration, figure, isNumber, MISSING, moment, oneLine, whole } from "./format.js";
import { kindOf, signOf } from "./marks.js";

const MOST_ROWS = 200;

let cameFrom = null;

export function prepareDetails() {
  find("details-close").addEventListener("click", closeDetails);
}

export function openDetails(run, event) {
  const panel = find("details");
  if (panel.hidden) cameFrom = document.activeElement;
  const kind = kindOf(event);
  const title = find("details-title");
  title.replaceChildren(signOf(kind), `${oneLine(kind.word)} at step ${whole(event.step)}`);
  const { time_unix: unix, event: _, step: __, ...rest } = event.details || {};
  const words = { run: run.name, what: event.title, when: moment(unix), "since start": duration(event.seconds) };
  const facts = { ...words, ...rest };
  find("details-body").replaceChildren(...partsOf(facts));
  panel.hidden = false;
  panel.scrollTop = 0;
  title.focus({ preventScroll: true });
}

/** Returns whether it was open. */
export function closeDetails() {
  const panel = find("details");
  if (panel.hidden) return false;
  panel.hidden = true;
  cameFrom?.focus?.({ preventScroll: true });
  return true;
}

/** Single values first, as keys and values; then every table under its own name. */
function partsOf(facts) {
  const list = make("dl", { className: "facts" });
  const tables = [];
  for (const [key, value] of Object.entries(facts)) {
    if (isTable(value)) tables.push(make("h3", {}, key), tableOf(value));
    else if (isObject(value)) tables.push(make("h3", {}, key), tableOfObject(value));
    else list.append(make("dt", {}, key.replaceAll("_", " ")), make("dd", {}, wordsOf(key, value)));
  }
  return [list, ...tables];
}

function isObject(value) {
  return value !== null && typeof value === "object" && !Array.isArray(value);
}

function isTable(value) {
  return Array.isArray(value) && value.length > 0 && value.every(isObject);
}

function tableOf(rows) {
  const keys = [...new Set(rows.slice(0, MOST_ROWS).flatMap((row) => Object.keys(row)))];
  const body = make("tbody");
  for (const row of rows.slice(0, MOST_ROWS)) {
    body.append(make("tr", {}, ...keys.map((key) => make("td", {}, key in row ? wordsOf(key, row[key]) : ""))));
  }
  const parts = [make("table", {}, headRow(keys), body)];
  if (rows.length > MOST_ROWS) parts.push(make("p", { className: "quiet" }, `and ${rows.length - MOST_ROWS} more`));
  return make("div", { className: "scroll", tabIndex: 0 }, ...parts);
}

function tableOfObject(value) {
  const rows = Object.entries(value).map(([key, inner]) =>
    make("tr", {}, make("th", { scope: "row" }, key), make("td", {}, wordsOf(key, inner))),
  );
  return make("div", { className: "scroll", tabIndex: 0 }, make("table", {}, make("tbody", {}, ...rows)));
}

function wordsOf(key, value) {
  if (value === null || value === undefined || value === "") return MISSING;
  if (isNumber(value)) {
    if (Number.isInteger(value)) return String(value);
    return key.endsWith("seconds") ? duration(value) : figure(value);
  }
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (Array.isArray(value) && !value.some((part) => typeof part === "object")) return value.map(oneLine).join(", ");
  return typeof value === "object" ? JSON.stringify(value) : oneLine(value);
}
