// The one tooltip of the page: a few lines beside what the pointer or the keyboard is at.

import { byId, element } from "./dom.js";

const DISTANCE = 12; // CSS pixels

// Show lines of text beside a box { x, y, width, height } of an element, in its CSS pixels.
export function showTip(owner, box, lines) {
  const tip = byId("tip");
  tip.replaceChildren(...lines.map((line) => element("p", {}, line)));
  tip.hidden = false;
  const origin = owner.getBoundingClientRect();
  const left = origin.left + box.x + box.width / 2 - tip.offsetWidth / 2;
  const below = origin.top + box.y + box.height + DISTANCE;
  const isAbove = below + tip.offsetHeight > innerHeight;
  tip.style.left = `${Math.max(4, Math.min(left, innerWidth - tip.offsetWidth - 4))}px`;
  tip.style.top = `${isAbove ? origin.top + box.y - DISTANCE - tip.offsetHeight : below}px`;
}

export function hideTip() {
  byId("tip").hidden = true;
}
