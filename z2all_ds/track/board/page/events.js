// The events of the visible runs: fetched if there are new ones, shown as a list, with kinds that can be hidden.

import { ask, showTrouble } from "./api.js";
import { openDetails } from "./details.js";
import { find, keyed, make, setText } from "./dom.js";
import { isNumber, moment, oneLine, whole } from "./format.js";
import { KINDS, kindOf, signOf } from "./marks.js";

/** Rows at first, and rows added per click. */
const ROWS = 100;

export class Events {
  /** Hidden kinds, in list and chart. */
  hiddenKinds = new Set();
  /** Incremented with every answer. */
  version = 0;
  #onChange;
  #runs = new Map();
  #mostRows = ROWS;

  constructor(onChange) {
    this.#onChange = onChange;
    find("events-more").addEventListener("click", () => {
      this.#mostRows += 5 * ROWS;
      this.#onChange();
    });
  }

  of(runId) {
    return this.#runs.get(runId)?.list || [];
  }

  /** Seconds from the run's start to each restart. */
  restartsOf(runId) {
    const restarts = this.of(runId).filter((event) => event.event === "restart" && isNumber(event.seconds));
    return restarts.map((event) => event.seconds).sort((one, other) => one - other);
  }

  async update(run) {
    const kept = this.#runs.get(run.id) || { list: [] };
    this.#runs.set(run.id, kept);
    // The tokens of an event's step are known once its record is read, which may be later.
    const waits = kept.list.some((event) => event.tokens_seen === null);
    const key = JSON.stringify([run.history, run.events, run.read_share === 1, waits ? run.records : 0]);
    if (kept.key === key || kept.isBusy) return;
    kept.isBusy = true;
    try {
      kept.list = run.events ? (await ask(`/api/events?run=${run.id}`)).events : [];
      kept.key = key;
      this.version += 1;
      this.#onChange();
    } catch (error) {
      showTrouble(error);
    } finally {
      kept.isBusy = false;
    }
  }

  show(runs) {
    const all = runs.flatMap((run) => this.of(run.id).map((event) => ({ run, event })));
    find("events-section").hidden = !all.length;
    this.#showKinds(all);
    const time = ({ event }) => event.details?.time_unix ?? event.seconds ?? 0;
    const rows = all.filter(({ event }) => !this.hiddenKinds.has(event.event));
    rows.sort((one, other) => time(other) - time(one) || other.event.number - one.event.number);
    const hasMany = runs.length > 1;
    const keyOf = ({ run, event }) => `${run.id} ${event.number} ${event.details?.time_unix} ${hasMany}`;
    const newest = rows.slice(0, this.#mostRows);
    keyed(find("events"), newest, keyOf, (row) => createRow(row, hasMany));
    const more = find("events-more");
    more.hidden = rows.length <= newest.length;
    setText(more, `Show older events (${whole(rows.length - newest.length)} more)`);
  }

  #showKinds(all) {
    const numbers = new Map();
    for (const { event } of all) numbers.set(event.event, (numbers.get(event.event) || 0) + 1);
    const order = Object.keys(KINDS);
    const kinds = [...numbers.keys()].sort((one, other) => order.indexOf(one) - order.indexOf(other));
    const create = (name) => {
      const kind = kindOf({ event: name });
      const button = make("button", { type: "button", title: "Show or hide these marks" });
      button.append(signOf(kind), `${oneLine(kind.word)} `, make("span", { className: "quiet" }));
      button.addEventListener("click", () => {
        if (!this.hiddenKinds.delete(name)) this.hiddenKinds.add(name);
        this.#onChange();
      });
      return make("li", {}, button);
    };
    keyed(find("kinds"), kinds, (name) => name, create, (item, name) => {
      item.firstElementChild.setAttribute("aria-pressed", String(!this.hiddenKinds.has(name)));
      setText(item.querySelector(".quiet"), whole(numbers.get(name)));
    });
  }
}

function createRow({ run, event }, hasMany) {
  const kind = kindOf(event);
  const button = make(
    "button",
    { type: "button", "data-event": `${run.id} ${event.number}` },
    signOf(kind),
    make("span", { className: "kind" }, oneLine(kind.word)),
    make("span", { className: "at" }, `step ${whole(event.step)}`),
    make("span", { className: "what" }, (hasMany ? `${oneLine(run.name)}: ` : "") + oneLine(event.title || "")),
    make("time", {}, moment(event.details?.time_unix)),
  );
  button.addEventListener("click", () => openDetails(run, event));
  return make("li", {}, button);
}
