// The front processes, a row each; there is nothing to show while the scheduler's own process holds the calls.

import { number } from "./wire.js";
import { byId, element, setText, syncChildren } from "./dom.js";
import { count, counted, rate, span } from "./format.js";

// Show the fronts of a GetSchedulerState response.
export function showFronts(fronts, rates) {
  byId("fronts").hidden = fronts.length === 0;
  const numReady = fronts.filter((front) => front.isReady).length;
  setText(byId("fronts-summary"), `${count(numReady)} of ${count(fronts.length)} accept calls`);
  syncChildren(byId("front-rows"), fronts, (front) => front.frontId, createRow,
    (row, front) => updateRow(row, front, rates.ofFront(front.frontId)));
}

function createRow(front) {
  const about = element("td", {}, element("strong", {}, `Front ${front.frontId} `), element("span", { className: "chip" }), element("p", { className: "about" }));
  return element("tr", {}, about, ...[0, 1, 2, 3, 4].map(() => element("td")));
}

function updateRow(row, front, tokensPerSecond) {
  const [first, ...cells] = row.children;
  const [, chip, about] = first.children;
  setText(chip, stateOf(front));
  chip.className = `chip ${front.isReady ? "good" : "bad"}`;
  const restarts = number(front.numRestarts);
  const parts = [front.pid ? `process ${front.pid}` : "", restarts ? `restarted ${counted(restarts, "time")}` : ""];
  setText(about, parts.filter(Boolean).join("; "));
  const hasJoined = front.numCredits !== undefined;
  const texts = [
    count(number(front.numRequests)), tokensPerSecond === undefined ? "–" : rate(tokensPerSecond),
    hasJoined ? span(number(front.loopLagUs)) : "–", count(number(front.numSessions)), hasJoined ? count(front.numCredits) : "–",
  ];
  texts.forEach((text, i) => setText(cells[i], text));
}

function stateOf(front) {
  if (front.isReady) return "accepting calls";
  return front.pid ? "not accepting calls" : "exited";
}
