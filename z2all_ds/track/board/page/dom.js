// Creates and changes elements. Text from files is only inserted as text, never as markup.

export function find(id) {
  return document.getElementById(id);
}

/** An element with these properties; `data-` and `aria-` names and `role` become attributes. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name.includes("-") || name === "role" || name === "scope") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function makeSvg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Changes only different text, so that screen readers and selections are not disturbed. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Makes `parent` hold one element per item, in order. An element stays the same for the same key, so that focus and
 * selection survive an update.
 */
export function keyed(parent, items, keyOf, create, update) {
  const before = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let child = before.get(key);
    if (child) before.delete(key);
    else {
      child = create(item);
      child.dataset.key = key;
    }
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
    update?.(child, item);
  }
  for (const child of before.values()) child.remove();
}

/** A table's head; a name that begins with # marks a column of numbers. */
export function headRow(names) {
  const cells = names.map((name) => {
    const isNumber = name.startsWith("#");
    return make("th", { scope: "col", className: isNumber ? "number" : "" }, isNumber ? name.slice(1) : name);
  });
  return make("thead", {}, make("tr", {}, ...cells));
}

/** A table that scrolls if it is too large, also with keys. */
export function tableIn(name, head, body) {
  const region = { className: "scroll", tabIndex: 0, role: "region", "aria-label": name };
  return make("div", region, make("table", {}, head, body));
}

/** A share of 0 to 1 as a bar with text next to it. */
export function bar(share, words, className = "") {
  const fill = make("span", { className: "fill" });
  fill.style.width = `${Math.round(1000 * Math.min(1, Math.max(0, share || 0))) / 10}%`;
  const track = make("span", { className: "track", "aria-hidden": "true" }, fill);
  return make("span", { className: `bar ${className}` }, track, make("span", { className: "words" }, words));
}
