// The run's data position, its stages, and the shares of domains: requested and actual.

import { bar, headRow, make, tableIn } from "./dom.js";
import { count, isNumber, MISSING, oneLine, percent, whole } from "./format.js";

export function mixtureOf(run, mixture, hasMany) {
  const figures = (mixture?.domains || []).flatMap(({ asked, realised }) => [asked, realised]);
  if (!figures.some(isNumber) && !isNumber(mixture?.position)) return null;
  const position = isNumber(mixture.position) ? `Next global sample: ${whole(mixture.position)}` : "";
  return make(
    "div",
    { className: "block" },
    hasMany ? make("h3", {}, oneLine(run.name)) : null,
    position ? make("p", {}, position) : null,
    mixture.domains?.length ? domainsTable(mixture.domains) : null,
    mixture.stages?.length > 1 ? stagesTable(mixture.stages) : null,
  );
}

function domainsTable(domains) {
  const most = Math.max(...domains.flatMap((domain) => [domain.asked, domain.realised, domain.recent]), 0.01);
  const partOf = (share, className) => (isNumber(share) ? bar(share / most, percent(share), className) : MISSING);
  const cell = (share, className) => make("td", {}, partOf(share, className));
  const body = make("tbody");
  for (const domain of domains) {
    body.append(
      make(
        "tr",
        {},
        make("th", { scope: "row" }, oneLine(domain.name)),
        cell(domain.asked, "asked"),
        cell(domain.realised, ""),
        cell(domain.recent, ""),
        make("td", { className: "number" }, count(domain.tokens)),
      ),
    );
  }
  const head = headRow(["Domain", "Requested", "Actual", "Recent", "#Tokens"]);
  return tableIn("Mixture", head, body);
}

function stagesTable(stages) {
  const names = [...new Set(stages.flatMap((stage) => Object.keys(stage.shares || {})))];
  const body = make("tbody");
  for (const stage of stages) {
    const shares = names.map((name) => make("td", { className: "number" }, percent(stage.shares?.[name])));
    const first = make("td", { className: "number" }, whole(stage.first_step));
    body.append(make("tr", {}, make("th", { scope: "row" }, oneLine(stage.name)), first, ...shares));
  }
  const head = headRow(["Stage", "#From step", ...names.map((name) => `#${oneLine(name)}`)]);
  return tableIn("Stages", head, body);
}
