// Lines that the user has hidden by clicking their names in a chart's legend.

export class HiddenLines {
  /** Incremented with every change. */
  version = 0;
  #charts = new Map();

  has(chartId, label) {
    return this.#charts.get(chartId)?.has(label) ?? false;
  }

  toggle(chartId, label) {
    const off = this.#charts.get(chartId) || new Set();
    if (!off.delete(label)) off.add(label);
    this.#set(chartId, off);
  }

  /** Shows only this one of `labels`; if it is already the only one, shows all. */
  only(chartId, label, labels) {
    const others = labels.filter((one) => one !== label);
    const isAlone = !this.has(chartId, label) && others.every((one) => this.has(chartId, one));
    this.#set(chartId, new Set(isAlone ? [] : others));
  }

  #set(chartId, off) {
    this.#charts.set(chartId, off);
    this.version += 1;
  }
}
