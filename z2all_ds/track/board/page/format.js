// Formats numbers for people.

export const MISSING = "\u2013";

const ODD_CHARACTERS = /[\u0000-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

/** A name on one line, without control characters and characters that change the text direction. */
export function oneLine(text) {
  return String(text).replace(ODD_CHARACTERS, " ");
}

/** Escapes a name for Plotly, which reads tags and entities, and shortens it for hover labels. */
export function plotlyText(text) {
  const line = [...oneLine(text)];
  const short = line.length > 60 ? [...line.slice(0, 59), "\u2026"] : line;
  return short.join("").replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

export function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/** About four significant digits. */
export function figure(value) {
  if (!isNumber(value)) return MISSING;
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2);
  if (Number.isInteger(value)) return String(value);
  return value.toFixed(size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : size >= 1 ? 3 : 4);
}

export function whole(value) {
  return isNumber(value) ? Math.round(value).toLocaleString("en-US") : MISSING;
}

/** 1234567 -> 1.23M */
export function count(value) {
  if (!isNumber(value)) return MISSING;
  for (const [size, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size) {
      const scaled = value / size;
      return `${scaled.toFixed(scaled >= 100 ? 0 : scaled >= 10 ? 1 : 2)}${letter}`;
    }
  }
  return String(Math.round(value * 10) / 10);
}

export function percent(share, digits = 1) {
  return isNumber(share) ? `${(100 * share).toFixed(digits)} %` : MISSING;
}

export function bytes(value) {
  if (!isNumber(value)) return MISSING;
  for (const [size, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (value >= size) return `${(value / size).toFixed(1)} ${unit}`;
  }
  return `${value} B`;
}

/** The two largest units: 1 d 4 h, 12 min 5 s. */
export function duration(seconds) {
  if (!isNumber(seconds) || seconds < 0) return MISSING;
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 10) return `${Math.round(10 * seconds) / 10} s`;
  let left = Math.round(seconds);
  const parts = [];
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]]) {
    const number = Math.floor(left / size);
    if (number || parts.length) parts.push(`${number} ${unit}`);
    left -= number * size;
  }
  return parts.slice(0, 2).join(" ");
}

export function moment(unix) {
  if (!isNumber(unix)) return MISSING;
  const part = (number) => String(number).padStart(2, "0");
  const time = new Date(1000 * unix);
  const day = `${time.getFullYear()}-${part(time.getMonth() + 1)}-${part(time.getDate())}`;
  return `${day} ${part(time.getHours())}:${part(time.getMinutes())}:${part(time.getSeconds())}`;
}
