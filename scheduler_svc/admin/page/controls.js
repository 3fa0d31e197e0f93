// What people press, type and link to.

import { setToken } from "./wire.js";
import { byId, setText } from "./dom.js";
import { hideTip } from "./tip.js";

const REQUEST_HASH = "#request=";

// The request that the address of the page names, #request=ID; null: none.
export function requestInHash() {
  if (!location.hash.startsWith(REQUEST_HASH)) return null;
  const text = location.hash.slice(REQUEST_HASH.length);
  try {
    return decodeURIComponent(text) || null;
  } catch {
    return text; // not encoded, and with a percent sign
  }
}

// Make the address of the page name a request, or none; return whether that changed it, which is a "hashchange".
export function setRequestInHash(requestId) {
  const hash = requestId === null ? "" : REQUEST_HASH + encodeURIComponent(requestId);
  const isOther = location.hash !== hash;
  if (isOther) location.hash = hash;
  return isOther;
}

// Tell the page what people do.
export function listenToControls(page, poller) {
  addEventListener("hashchange", () => page.selectRequest(requestInHash()));
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") hideTip();
  });
  onSubmit("search", () => {
    const id = byId("search-id").value.trim();
    if (id) page.openRequest(id);
  });
  onSubmit("token-form", () => {
    setToken(byId("token").value);
    byId("token").value = "";
    poller.ask();
  });
  byId("pause").addEventListener("click", () => {
    poller.setPaused(!poller.isPaused);
    byId("pause").setAttribute("aria-pressed", poller.isPaused);
    setText(byId("pause"), poller.isPaused ? "Resume" : "Pause");
  });
  byId("interval").addEventListener("change", (event) => poller.setInterval(Number(event.target.value)));
  byId("steps-executor").addEventListener("change", (event) => page.chooseExecutor(event.target.value));
  byId("request-close").addEventListener("click", () => setRequestInHash(null));
  byId("block-close").addEventListener("click", () => page.closeBlock());
  byId("step-close").addEventListener("click", () => page.closeStep());
}

function onSubmit(id, act) {
  byId(id).addEventListener("submit", (event) => {
    event.preventDefault();
    act();
  });
}
