// The last value of each probe, and whether it is as expected.

import { headRow, make, tableIn } from "./dom.js";
import { figure, isNumber, MISSING, oneLine, whole } from "./format.js";

export function probesOf(run, answer, hasMany) {
  const probes = answer?.probes || [];
  if (!probes.length) return null;
  const judged = probes.filter(({ passed }) => passed !== null);
  const hasFailed = judged.some(({ passed }) => !passed);
  const className = judged.length ? (hasFailed ? "verdict-bad" : "verdict-good") : "quiet";
  return make(
    "div",
    { className: "block" },
    hasMany ? make("h3", {}, oneLine(run.name)) : null,
    make("p", { className }, countsOf(probes, judged)),
    tableOf(probes),
  );
}

function countsOf(probes, judged) {
  const steps = probes.map(({ step }) => step).filter(isNumber);
  const rest = probes.length - judged.length;
  if (!steps.length) return `${probes.length} probes, none asked yet`;
  const when = `at step ${whole(Math.max(...steps))}`;
  if (!judged.length) return `${probes.length} asked ${when}, none of them judged`;
  const met = judged.filter(({ passed }) => passed).length;
  return `${met} of ${judged.length} as expected ${when}${rest ? `, ${rest} not judged` : ""}`;
}

function tableOf(probes) {
  const rank = ({ passed }) => (passed === false ? 0 : passed ? 1 : 2);
  const body = make("tbody");
  for (const probe of [...probes].sort((one, other) => rank(one) - rank(other))) {
    body.append(
      make(
        "tr",
        {},
        make("th", { scope: "row" }, oneLine(probe.name)),
        make("td", {}, oneLine(probe.kind ?? MISSING)),
        make("td", { className: "number" }, figure(probe.value)),
        make("td", { className: "words" }, expectationOf(probe)),
        verdictCell(probe.passed),
        make("td", { className: "number" }, whole(probe.step)),
      ),
    );
  }
  return tableIn("Probes", headRow(["Probe", "Kind", "#Latest", "Expected", "Verdict", "#Step"]), body);
}

function expectationOf({ at_least: least, at_most: most, from_step: fromStep }) {
  const short = (bound) => String(Number(bound.toPrecision(4)));
  const bounds = [isNumber(least) ? `\u2265 ${short(least)}` : "", isNumber(most) ? `\u2264 ${short(most)}` : ""];
  const words = bounds.filter(Boolean).join(", ");
  return words ? words + (fromStep ? ` from step ${whole(fromStep)}` : "") : MISSING;
}

function verdictCell(passed) {
  if (passed === null) return make("td", { className: "quiet" }, MISSING);
  return make("td", { className: passed ? "verdict-good" : "verdict-bad" }, passed ? "pass" : "fail");
}

/** The runs with `probeList` for the charts; an older run without kinds gets those of the other runs' probes. */
export function withProbeLists(runs, listOf) {
  const kinds = new Map();
  for (const run of runs) for (const { name, kind } of listOf(run.id)) if (kind) kinds.set(name, kind);
  const filled = (probe) => ({ ...probe, kind: probe.kind ?? kinds.get(probe.name) ?? null });
  return runs.map((run) => ({ ...run, probeList: listOf(run.id).map(filled) }));
}
