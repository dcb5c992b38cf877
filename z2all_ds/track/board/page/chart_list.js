// The charts and the series of the records that each shows.

const GIB = 2 ** 30;
const KNOWN_KINDS = ["completion", "format", "sentence", "compare"];

const ofDomains = (prefix) => (run) => run.domains.map((name) => ({ series: `${prefix}_of_${name}`, label: name }));
const allAndDomains = (name) => (run) => [{ series: name, label: "all" }, ...ofDomains(name)(run)];
/** `run.probeList` is the server's answer, missing until it arrives. `points`: of later evaluations. */
const ofProbes = (...kinds) => (run) => {
  const own = (run.probeList || []).filter(({ kind }) => kinds.includes(KNOWN_KINDS.includes(kind) ? kind : null));
  return own.map(({ name, points }) => ({ series: `probe_${name}`, label: name, points }));
};
const one = (series, label) => () => [{ series, label }];

/**
 * `isSmoothed`: smoothing applies; `hasLog`: the log switch applies; `isLog`: always logarithmic, whatever the
 * switch is; `floor`: lower values are drawn there; `isSparse`: only some steps have a value; `fromZero`: the axis
 * begins at 0; `hasZero`: 0 is on it, with a line; `byDomain`: colours and dashes are those of the domains in all
 * charts; `isCrowded`: too many lines for one label with all of them.
 */
const CHARTS = [
  {
    id: "loss", title: "Loss", unit: "nats per token", lines: one("loss", "loss"),
    isSmoothed: true, hasBand: true, hasLog: true, hasMarks: true, isWide: true,
  },
  {
    id: "domain_loss", title: "Loss by domain", unit: "nats per token", lines: ofDomains("loss"),
    isSmoothed: true, hasLog: true, byDomain: true,
  },
  {
    id: "validation_loss", title: "Validation loss", unit: "nats per token", lines: allAndDomains("validation_loss"),
    isSparse: true, hasLog: true, byDomain: true,
  },
  {
    id: "validation_perplexity", title: "Validation perplexity", unit: "per token",
    lines: allAndDomains("validation_perplexity"), isSparse: true, isLog: true, byDomain: true,
  },
  { id: "lr", title: "Learning rate", unit: "", lines: one("lr", "learning rate"), tickExponent: "e" },
  {
    id: "grad_norm", title: "Gradient norm", unit: "before clipping", lines: one("grad_norm", "gradient norm"),
    isSmoothed: true, hasLog: true,
  },
  {
    id: "tokens_per_second", title: "Throughput", unit: "tokens per second",
    lines: one("tokens_per_second", "tokens per second"), isSmoothed: true, fromZero: true,
  },
  {
    id: "mfu", title: "MFU", unit: "share of the hardware's peak", lines: one("mfu", "MFU"),
    isSmoothed: true, fromZero: true, tickFormat: ".3~%",
  },
  {
    id: "memory", title: "Memory", unit: "GiB per rank", scale: 1 / GIB, fromZero: true,
    lines: () => [
      { series: "memory_bytes", label: "used" },
      { series: "peak_memory_bytes", label: "peak" },
      { series: "reserved_memory_bytes", label: "reserved" },
      { series: "host_memory_bytes", label: "host" },
    ],
  },
  {
    id: "probes_probability", title: "Probes: probability", unit: "of the expected text; below 1e-12 at the bottom",
    lines: ofProbes("completion", "format"), isSparse: true, isCrowded: true, isLog: true, floor: 1e-12,
    tickExponent: "e",
  },
  {
    id: "probes_perplexity", title: "Probes: perplexity", unit: "per token", lines: ofProbes("sentence"),
    isSparse: true, isCrowded: true, isLog: true,
  },
  {
    id: "probes_margin", title: "Probes: margin", unit: "nats; positive if the better text is more likely",
    lines: ofProbes("compare"), isSparse: true, isCrowded: true, hasZero: true,
  },
  { id: "probes", title: "Probes", unit: "", lines: ofProbes(null), isSparse: true, isCrowded: true, hasLog: true },
];

const TIME_PARTS = ["data_wait", "forward", "backward", "optimizer", "checkpoint", "validation", "other"];

/** Each run has its own chart: stacks of two runs in one chart are unreadable. */
function timeSplit(run, isOnly) {
  const lines = TIME_PARTS.map((part) => ({ series: `${part}_seconds`, label: part.replace("_", " ") }));
  return {
    id: `time_split ${run.id}`, title: "Time split", unit: `${isOnly ? "" : `${run.name}, `}seconds per step`,
    lines: () => [...lines, { series: "communication_seconds", label: "communication (included)", isOver: true }],
    onlyRun: run.id, isSmoothed: true, isStack: true, fromZero: true,
  };
}

/** In the order of the page. */
export function chartsFor(runs) {
  const split = runs.map((run) => timeSplit(run, runs.length === 1));
  const place = CHARTS.findIndex((chart) => chart.id === "memory");
  return [...CHARTS.slice(0, place), ...split, ...CHARTS.slice(place)];
}

/** The run's series that some chart shows. */
export function seriesOf(run) {
  const there = new Set(run.names);
  const wanted = new Set(run.probes.map((name) => `probe_${name}`));
  for (const chart of chartsFor([run])) {
    for (const { series } of chart.lines(run)) if (there.has(series)) wanted.add(series);
  }
  return [...wanted];
}
