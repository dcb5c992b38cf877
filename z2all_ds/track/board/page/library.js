// Plotly, loaded when there is something to draw, after the page and its first sketch.

const SOURCE = "/plotly.js";

let loading = null;

export function isLoaded() {
  return "Plotly" in window;
}

/** Resolves when `Plotly` can be used; after a failure the next call tries again. */
export function load() {
  loading ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = SOURCE;
    const fail = () => {
      loading = null;
      script.remove();
      reject(new Error("The board's charts could not be loaded. Is `z2all board` still running?"));
    };
    // A proxy's error page or a truncated file also loads without an error.
    script.onload = () => (isLoaded() ? resolve() : fail());
    script.onerror = fail;
    document.head.append(script);
  });
  return loading;
}
