// The last curves of each run from the server, fetched again only if there is something new.

import { ask, showTrouble } from "./api.js";
import { isNumber } from "./format.js";

const POINTS = 800;
/** Fetched beyond both ends of a zoom, as a share of it: for smoothing, and so that a pan shows something at once. */
const MARGIN = 0.25;
/** Names per request: the length of a URL is limited. */
const NAMES_AT_ONCE = 60;
/** Largest share of the time for fetching growing curves; slow connections are asked less often. */
const BUSY_SHARE = 0.2;

export class Curves {
  /** Incremented with every answer. */
  version = 0;
  #onChange;
  #runs = new Map();

  constructor(onChange) {
    this.#onChange = onChange;
  }

  /** Fetches the curves that the view needs. */
  update(run, names, view) {
    if (!run.records || !names.length) {
      this.#runs.delete(run.id);
      return;
    }
    const kept = this.#kept(run.id);
    const looks = JSON.stringify([view.x, view.zoom, names]);
    const grown = JSON.stringify([run.history, this.#isPast(run, view) ? "past" : run.records, run.read_share]);
    const isOtherLook = looks !== kept.looks;
    if (!isOtherLook && (grown === kept.grown || kept.isBusy || performance.now() < kept.notBefore)) return;
    kept.controller?.abort();
    kept.controller = new AbortController();
    Object.assign(kept, { looks, grown, isBusy: true });
    this.#fetch(run.id, kept, names, view.x, view.zoom, kept.controller.signal);
  }

  /** {x kind, lines: Map of name to {x, weight, mean, min, max}}, or undefined before the first answer. */
  of(runId) {
    return this.#runs.get(runId)?.have;
  }

  /** Whether the series ever had a value: a chart stays even if a zoom shows a part without any. */
  hasFigures(runId, name) {
    return this.#runs.get(runId)?.seen.has(name) ?? false;
  }

  /** [first, last] of the whole run, which grows while the curves show a part of it. */
  extent(run, xKind) {
    const seen = this.#runs.get(run.id)?.extents[xKind];
    const [first, lastSeen] = seen?.history === run.history ? seen.ends : [0, 0];
    const seconds = run.last_record_unix - run.started_unix;
    const last = { step: run.step, tokens: run.tokens_seen, time: seconds }[xKind];
    return [first, Math.max(lastSeen, last || 0) || 1];
  }

  #kept(runId) {
    if (!this.#runs.has(runId)) this.#runs.set(runId, { extents: {}, seen: new Set(), notBefore: 0, isBusy: false });
    return this.#runs.get(runId);
  }

  /** New records do not change a zoom into older ones. */
  #isPast(run, view) {
    if (!view.zoom || run.read_share < 1) return false;
    const [from, to] = withMargin(view.zoom);
    const last = { step: run.step, tokens: run.tokens_seen, time: null }[view.x];
    return last !== null && to > from && to < last;
  }

  async #fetch(runId, kept, names, xKind, zoom, signal) {
    const began = performance.now();
    try {
      const lines = new Map();
      let history = null;
      for (let start = 0; start < names.length; start += NAMES_AT_ONCE) {
        const answer = await ask(question(runId, names.slice(start, start + NAMES_AT_ONCE), xKind, zoom), signal);
        history = answer.history;
        for (const [name, line] of Object.entries(answer.series)) {
          lines.set(name, { x: answer.x, weight: answer.weight, ...line });
        }
      }
      kept.have = { x: xKind, lines };
      for (const [name, line] of lines) if (line.mean.some(isNumber)) kept.seen.add(name);
      const xs = [...lines.values()][0]?.x;
      if (!zoom && xs?.length) kept.extents[xKind] = { history, ends: [xs[0], xs[xs.length - 1]] };
      kept.isBusy = false;
      const spent = performance.now() - began;
      kept.notBefore = performance.now() + spent / BUSY_SHARE - spent;
      this.version += 1;
      this.#onChange();
    } catch (error) {
      if (error.name === "AbortError") return;
      Object.assign(kept, { looks: null, isBusy: false });
      showTrouble(error);
    }
  }
}

function withMargin([from, to]) {
  const margin = MARGIN * (to - from);
  return [from - margin, to + margin];
}

function question(runId, names, xKind, zoom) {
  const words = new URLSearchParams({ run: runId, x: xKind, points: String(POINTS) });
  if (zoom) {
    const [from, to] = withMargin(zoom);
    words.set("from", String(from));
    words.set("to", String(to));
    words.set("points", String(Math.round(POINTS * (1 + 2 * MARGIN))));
  }
  for (const name of names) words.append("name", name);
  return `/api/curves?${words}`;
}
