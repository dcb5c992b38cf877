// Plotly, fetched when there is something to draw: the page and its first picture come before it.

const SOURCE = "/plotly.js";

let loading = null;

export function isLoaded() {
  return "Plotly" in window;
}

/** Settled when `Plotly` can be used; after a failure the next call tries again. */
export function load() {
  loading ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = SOURCE;
    const fail = () => {
      loading = null;
      script.remove();
      reject(new Error("The board's charts could not be loaded. Is its command still running?"));
    };
    // A proxy's page of words, or a file cut short, is loaded too.
    script.onload = () => (isLoaded() ? resolve() : fail());
    script.onerror = fail;
    document.head.append(script);
  });
  return loading;
}
