// Questions to the board's server, and the banner that tells when it does not answer.

import { find, setText } from "./dom.js";

/** The server answered, and said in one line what is wrong. */
class Refused extends Error {}

export async function ask(path, signal) {
  let answer;
  try {
    answer = await fetch(path, { signal, cache: "no-store", credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The board does not answer, trying again. Is its command still running?");
  }
  if (answer.ok) return answer.json();
  let words = `The board answered ${answer.status}.`;
  try {
    words = (await answer.json()).error || words;
  } catch {
    // Not one of its own answers, a proxy's perhaps: the number is all there is.
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
