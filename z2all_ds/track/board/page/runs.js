// The list of runs: a checkbox and the status of each.

import { find, keyed, make, setText } from "./dom.js";
import { count, duration, figure, isNumber, MISSING, percent, whole } from "./format.js";
import { colour } from "./palette.js";

const STATUS_WORDS = {
  running: "running", done: "done", stopped: "stopped", requeue: "waiting for restart", failed: "failed", silent: "silent",
  empty: "no records yet", unreachable: "unreachable",
};
const FIGURES = [
  ["loss", "Loss", (run) => figure(run.loss)],
  ["speed", "tok/s", (run) => count(run.tokens_per_second)],
  ["mfu", "MFU", (run) => percent(run.mfu)],
  ["eta", "ETA", (run) => duration(run.eta_seconds)],
  ["tokens", "Tokens", (run) => count(run.tokens_seen)],
  ["elapsed", "Time", (run) => duration(run.elapsed_seconds)],
  ["goodput", "Goodput", (run) => percent(run.goodput)],
];

/** `onToggle(run)` is called when its checkbox is used. */
export function showRuns(runs, hidden, onToggle) {
  keyed(find("runs"), runs, (run) => `${run.id} ${run.name}`, (run) => createRun(run, onToggle), (item, run) =>
    fillRun(item, run, hidden),
  );
}

function createRun(run, onToggle) {
  const box = make("input", { type: "checkbox", "data-run": run.id });
  box.addEventListener("change", () => onToggle(run));
  const name = make("span", { className: "name", title: `${run.name}\n${run.location}` }, run.name);
  const hint = "Key that shows or hides this run";
  const key = run.number < 9 ? make("kbd", { title: hint }, String(run.number + 1)) : null;
  const figures = FIGURES.map(([id, word]) =>
    make("div", { "data-figure": id }, make("dt", {}, word), make("dd", {}, MISSING)),
  );
  return make(
    "li",
    {},
    make("div", { className: "run-head" }, make("label", {}, box, name), key),
    make("div", { className: "run-line" }, make("span", { className: "status" }), make("span", { className: "steps" })),
    make("progress", { className: "way", max: 1, "aria-label": `Steps done of ${run.name}` }),
    make("dl", { className: "figures" }, ...figures),
    make("p", { className: "note" }),
    make("div", { className: "reading" }, make("progress", { max: 1 }), make("span", { role: "status" })),
  );
}

function fillRun(item, run, hidden) {
  const box = item.querySelector("input");
  box.checked = !hidden.has(run.name);
  box.style.accentColor = colour(run.number);
  item.style.setProperty("--run", colour(run.number));
  item.classList.toggle("off", hidden.has(run.name));
  const status = item.querySelector(".status");
  setText(status, STATUS_WORDS[run.status] || run.status);
  status.dataset.status = run.status;
  const share = isNumber(run.step) && run.steps ? run.step / run.steps : null;
  const steps = run.steps ? `${whole(run.step)} / ${whole(run.steps)} steps` : `step ${whole(run.step)}`;
  setText(item.querySelector(".steps"), run.records ? steps + (share === null ? "" : `, ${percent(share)}`) : "");
  const way = item.querySelector(".way");
  way.hidden = share === null;
  way.value = share ?? 0;
  for (const [id, , words] of FIGURES) {
    const value = words(run);
    const part = item.querySelector(`[data-figure="${id}"]`);
    part.hidden = value === MISSING;
    setText(part.querySelector("dd"), value);
  }
  const note = item.querySelector(".note");
  setText(note, run.note || "");
  note.hidden = !run.note;
  const reading = item.querySelector(".reading");
  const isReading = run.read_share < 1;
  reading.hidden = !isReading && !run.is_sample;
  const howFar = reading.querySelector("progress");
  howFar.hidden = !isReading;
  howFar.value = run.read_share ?? 1;
  const untilThen = `reading ${Math.floor(100 * run.read_share)} %, curves are a sample until then`;
  setText(reading.querySelector("span"), isReading ? untilThen : "curves are a sample: zoom in for every step");
}
