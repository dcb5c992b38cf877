// Keyboard shortcuts. Keys that a focused control uses itself are left to it.

const ARROWS = ["ArrowLeft", "ArrowRight"];

/** `actions`: {run(number), log(), nextX(), pause(), reset(), zoom(factor), pan(share), help(), escape()} */
export function listenToKeys(actions) {
  const ways = {
    l: actions.log, x: actions.nextX, p: actions.pause, 0: actions.reset, "?": actions.help,
    "+": () => actions.zoom(0.5), "=": () => actions.zoom(0.5), "-": () => actions.zoom(2),
    ArrowLeft: () => actions.pan(-0.25), ArrowRight: () => actions.pan(0.25), Escape: actions.escape,
  };
  for (let number = 1; number <= 9; number++) ways[number] = () => actions.run(number - 1);
  addEventListener("keydown", (press) => {
    if (press.ctrlKey || press.metaKey || press.altKey || press.defaultPrevented) return;
    if (document.querySelector("dialog[open]")) return;
    const way = Object.hasOwn(ways, press.key) ? ways[press.key] : null;
    if (!way || (press.key !== "Escape" && isItsOwn(press.target, press.key))) return;
    press.preventDefault();
    way();
  });
}

function isItsOwn(target, key) {
  if (target instanceof HTMLInputElement) {
    if (["search", "text"].includes(target.type)) return true;
    return ["range", "radio"].includes(target.type) && ARROWS.includes(key);
  }
  return target instanceof Element && ARROWS.includes(key) && target.closest(".scroll") !== null;
}
