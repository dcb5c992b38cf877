// The health of each node and rank.

import { bar, headRow, make, setText, tableIn } from "./dom.js";
import { bytes, duration, oneLine, whole } from "./format.js";

/** With more ranks, those that are ok are only counted. */
const MOST_RANKS = 64;

/** Runs whose ranks are all shown. */
const wantsAll = new Set();

/** One run's block, or null if nothing is known; `drawAgain` is called when the user asks for all ranks. */
export function healthOf(run, health, hasMany, drawAgain) {
  if (!health?.ranks?.length) return null;
  const bad = health.ranks.filter((rank) => rank.verdict !== "ok");
  const verdict = bad.length
    ? `${bad.length} of ${health.ranks.length} ranks slow or waiting`
    : health.ranks.length === 1 ? "the only rank is ok" : `all ${health.ranks.length} ranks are ok`;
  const words = make("p", { className: bad.length ? "verdict-bad" : "verdict-good" }, verdict);
  words.append(make("span", { className: "quiet age" }));
  const block = make("div", { className: "block" }, hasMany ? make("h3", {}, oneLine(run.name)) : null, words);
  tellAge(block, health);
  const most = Math.max(...health.ranks.map((rank) => rank.work_seconds || 0), 1e-9);
  if (health.nodes?.length > 1) block.append(nodesTable(health.nodes, most));
  const isShort = health.ranks.length > MOST_RANKS && !wantsAll.has(run.id);
  const ranks = isShort ? bad.slice(0, MOST_RANKS) : health.ranks;
  if (ranks.length) block.append(ranksTable(ranks, most));
  if (isShort) {
    const button = make("button", { type: "button" }, `Show all ${whole(health.ranks.length)} ranks`);
    button.addEventListener("click", () => {
      wantsAll.add(run.id);
      drawAgain();
    });
    block.append(button);
  }
  return block;
}

/** Updates the age; the tables stay as they are. */
export function tellAge(block, health) {
  const sinceAnswer = (performance.now() - health.answered_ms) / 1000;
  const age = duration(Math.round(health.age_seconds + sinceAnswer));
  setText(block.querySelector(".age"), `, last seen at step ${whole(health.step)}, ${age} ago`);
}

function nodesTable(nodes, most) {
  const body = make("tbody");
  for (const node of nodes) {
    body.append(
      make(
        "tr",
        {},
        make("th", { scope: "row" }, oneLine(node.host)),
        make("td", { className: "number" }, whole(Array.isArray(node.ranks) ? node.ranks.length : node.ranks)),
        make("td", {}, bar(node.work_seconds / most, duration(node.work_seconds))),
        verdictCell(node.verdict),
      ),
    );
  }
  return tableIn("Nodes", headRow(["Node", "#Ranks", "Work per step (median)", "Verdict"]), body);
}

function ranksTable(ranks, most) {
  const body = make("tbody");
  for (const rank of ranks) {
    body.append(
      make(
        "tr",
        {},
        make("th", { scope: "row", className: "number" }, String(rank.rank)),
        make("td", {}, oneLine(rank.host ?? "")),
        make("td", {}, bar(rank.work_seconds / most, duration(rank.work_seconds))),
        make("td", { className: "number" }, duration(rank.data_wait_seconds)),
        make("td", { className: "number" }, bytes(rank.memory_bytes)),
        verdictCell(rank.verdict),
      ),
    );
  }
  return tableIn("Ranks", headRow(["#Rank", "Node", "Work per step", "#Data wait", "#Memory", "Verdict"]), body);
}

function verdictCell(verdict) {
  return make("td", { className: verdict === "ok" ? "verdict-good" : "verdict-bad" }, oneLine(verdict));
}
