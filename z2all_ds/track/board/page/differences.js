// The configuration of the runs side by side: differing keys or all keys that match the filter.

import { ask, showTrouble } from "./api.js";
import { find, headRow, make, setText } from "./dom.js";
import { MISSING, oneLine } from "./format.js";

const MOST_ROWS = 500;

export class Differences {
  #keys = [];
  #runs = [];
  #have = null;
  #isBusy = false;

  constructor() {
    find("config-filter").addEventListener("input", () => this.#show());
    find("config-all").addEventListener("change", () => this.#show());
  }

  /** A restarted run may have another configuration; its events show a restart. */
  async update(runs) {
    const key = JSON.stringify(runs.map((run) => [run.id, run.name, run.events]));
    if (key === this.#have || this.#isBusy) return;
    this.#isBusy = true;
    try {
      const ids = runs.map((run) => encodeURIComponent(run.id)).join(",");
      this.#keys = runs.length ? (await ask(`/api/differences?runs=${ids}`)).keys : [];
      this.#runs = runs;
      this.#have = key;
      this.#show();
    } catch (error) {
      showTrouble(error);
    } finally {
      this.#isBusy = false;
    }
  }

  #show() {
    find("config-section").hidden = !this.#keys.length;
    const isOne = this.#runs.length < 2;
    setText(find("config-title"), isOne ? "Configuration" : "Configuration differences");
    const wantsAll = find("config-all").checked || isOne;
    find("config-all").parentElement.hidden = isOne;
    const filter = find("config-filter").value.trim().toLowerCase();
    const holds = (text) => text.toLowerCase().includes(filter);
    const passes = ({ key, values, differs }) => (differs || wantsAll) && [key, ...values.map(words)].some(holds);
    const rows = this.#keys.filter(passes);
    const body = make("tbody");
    for (const { key, values, differs } of rows.slice(0, MOST_ROWS)) {
      const cells = values.map((value) => make("td", {}, words(value)));
      const name = make("th", { scope: "row" }, oneLine(key));
      body.append(make("tr", { className: differs ? "differs" : "" }, name, ...cells));
    }
    find("config").replaceChildren(headRow(["Key", ...this.#runs.map((run) => oneLine(run.name))]), body);
    const left = rows.length > MOST_ROWS ? `, the first ${MOST_ROWS} shown` : "";
    const isSame = !rows.length && !filter && !isOne;
    setText(find("config-words"), isSame ? "no key differs" : `${rows.length} of ${this.#keys.length} keys${left}`);
  }
}

function words(value) {
  if (value === null || value === undefined) return MISSING;
  return oneLine(typeof value === "object" ? JSON.stringify(value) : value);
}
