// Elements without innerHTML: what the server says is only ever text.

// Make an element. Properties that the element has are set, others become attributes; children are nodes or text.
export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

export function byId(id) {
  return document.getElementById(id);
}

// Set a text only if it is another one: an unchanged page is not laid out again.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Show the sentence in a node that is hidden while there is none.
export function setSentence(node, text) {
  setText(node, text);
  node.hidden = !text;
}

// Make the children of `parent` be one node for each item, in their order; nodes stay with the key of their item.
// `create(item)` makes a node, `update(node, item)` fills it in.
export function syncChildren(parent, items, keyOf, create, update) {
  const nodes = (parent.nodesByKey ??= new Map());
  const keys = new Set(items.map(keyOf));
  for (const [key, node] of nodes) {
    if (keys.has(key)) continue;
    node.remove();
    nodes.delete(key);
  }
  let next = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    if (!nodes.has(key)) nodes.set(key, create(item));
    const node = nodes.get(key);
    update(node, item);
    if (node === next) next = next.nextElementSibling;
    else parent.insertBefore(node, next);
  }
}

// A button that looks like a link and opens something on the page.
export function linkButton(text, onClick, properties = {}) {
  const button = element("button", { type: "button", className: "link", ...properties }, text);
  button.addEventListener("click", onClick);
  return button;
}

const LONG_FACT = 24; // characters; such facts have a row of their own

// Fill a <dl> with pairs of a name and a text; pairs without a value are left out.
export function fillFacts(list, facts) {
  const shown = facts.filter(([, value]) => value !== undefined && value !== "");
  list.replaceChildren(...shown.map(([name, value]) => element("div", { className: value.length > LONG_FACT ? "long" : "" },
    element("dt", {}, name), element("dd", {}, value))));
}
