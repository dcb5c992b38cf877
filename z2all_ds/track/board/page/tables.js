// A section of the page with one block of tables per run, from one API of the server.

import { ask, showTrouble } from "./api.js";
import { find } from "./dom.js";

export class Tables {
  #name;
  #section;
  #keyOf;
  #build;
  #refresh;
  #runs = new Map();
  #drawn = "";
  /** Incremented with every answer that differs from the one before. */
  version = 0;

  /**
   * `name`: of the question; `section`: of the page; `keyOf(run)`: what must change before it is asked again;
   * `build(run, answer, hasMany, drawAgain)`: the block or null; `refresh(block, answer)`: what changes
   * without building.
   */
  constructor(name, section, keyOf, build, refresh = () => {}) {
    this.#name = name;
    this.#section = section;
    this.#keyOf = keyOf;
    this.#build = build;
    this.#refresh = refresh;
  }

  async update(run, wantDraw) {
    const kept = this.#runs.get(run.id) || { key: null, number: 0 };
    this.#runs.set(run.id, kept);
    const key = JSON.stringify(this.#keyOf(run));
    if (kept.key === key || kept.isBusy) return;
    kept.isBusy = true;
    try {
      const answer = await ask(`/api/${this.#name}?run=${encodeURIComponent(run.id)}`);
      const text = JSON.stringify(answer);
      kept.key = key;
      if (text === kept.text) return;
      Object.assign(kept, { answer, text, number: kept.number + 1 });
      answer.answered_ms = performance.now();
      this.version += 1;
      wantDraw();
    } catch (error) {
      showTrouble(error);
    } finally {
      kept.isBusy = false;
    }
  }

  /** The run's last answer. */
  of(runId) {
    return this.#runs.get(runId)?.answer;
  }

  /** Rebuilds only if an answer is new: the user may be reading, or have the focus in a table. */
  show(runs, wantDraw) {
    const numbers = JSON.stringify(runs.map((run) => [run.id, run.name, this.#runs.get(run.id)?.number]));
    const holder = find(this.#section);
    if (numbers === this.#drawn) {
      for (const block of holder.children) this.#refreshBlock(block, runs);
      return;
    }
    const drawAgain = () => {
      this.#drawn = "";
      wantDraw();
    };
    const scrolled = [...holder.querySelectorAll(".scroll")].map((part) => [part.scrollLeft, part.scrollTop]);
    const blocks = [];
    for (const run of runs) {
      const block = this.#build(run, this.#runs.get(run.id)?.answer, runs.length > 1, drawAgain);
      if (block) {
        block.dataset.run = run.id;
        blocks.push(block);
      }
    }
    holder.replaceChildren(...blocks);
    [...holder.querySelectorAll(".scroll")].forEach((part, number) => {
      [part.scrollLeft, part.scrollTop] = scrolled[number] || [0, 0];
    });
    find(`${this.#section}-section`).hidden = !blocks.length;
    this.#drawn = numbers;
  }

  #refreshBlock(block, runs) {
    const run = runs.find(({ id }) => id === block.dataset.run);
    const answer = this.#runs.get(block.dataset.run)?.answer;
    if (run && answer) this.#refresh(block, answer);
  }
}
