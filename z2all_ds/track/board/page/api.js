// Requests to the board's server, and the banner shown when it does not answer.

import { find, setText } from "./dom.js";

/** The server answered with an error message of one line. */
class Refused extends Error {}

export async function ask(path, signal) {
  let answer;
  try {
    answer = await fetch(path, { signal, cache: "no-store", credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The board does not answer, retrying. Is `z2all board` still running?");
  }
  if (answer.ok) return answer.json();
  let words = `The board answered ${answer.status}.`;
  try {
    words = (await answer.json()).error || words;
  } catch {
    // Not an answer of the board, perhaps of a proxy: only the status code is known.
  }
  throw new Refused(words);
}

export function showTrouble(error) {
  if (error.name === "AbortError") return;
  const banner = find("banner");
  setText(banner, error.message);
  banner.hidden = false;
  if (!(error instanceof Refused) && !error.message.startsWith("The board")) console.error(error);
}

export function hideTrouble() {
  find("banner").hidden = true;
}
