// A request's life as phases: from each event to the next one.

import { number } from "./wire.js";

// What a request does after an event; ends have no phase.
const PHASE_AFTER = {
  REQUEST_EVENT_KIND_ARRIVED: "waiting",
  REQUEST_EVENT_KIND_ADMITTED: "prefill",
  REQUEST_EVENT_KIND_FIRST_TOKEN: "decode",
  REQUEST_EVENT_KIND_PREEMPTED: "out",
  REQUEST_EVENT_KIND_DROPPED: "out",
  REQUEST_EVENT_KIND_SWAPPED_OUT: "out",
  REQUEST_EVENT_KIND_SWAPPED_IN: "decode",
  REQUEST_EVENT_KIND_EXECUTOR_LOST: "out",
  REQUEST_EVENT_KIND_PARKED: "out",
};

export const PHASE_NAMES = { waiting: "waiting", prefill: "prompt", decode: "decoding", out: "preempted or lost" };

// Return { phase, fromUs, us } of each event but the end; the last one lasts until `nowUs`, since arrival.
export function phasesOf(events, nowUs) {
  let isOut = false, hasMadeToken = false;
  const phases = [];
  events.forEach((event, i) => {
    const fromUs = number(event.sinceArrivalUs);
    const untilUs = i + 1 < events.length ? number(events[i + 1].sinceArrivalUs) : Math.max(nowUs, fromUs);
    let phase = PHASE_AFTER[event.kind];
    if (!phase) return;
    const isFirstToken = event.kind === "REQUEST_EVENT_KIND_FIRST_TOKEN";
    hasMadeToken ||= isFirstToken;
    // A token that was on its way may come while its request is out. What comes back with tokens soon makes more.
    if (isFirstToken && isOut) phase = "out";
    if (phase === "prefill" && hasMadeToken) phase = "decode";
    isOut = phase === "out";
    phases.push({ phase, fromUs, us: untilUs - fromUs });
  });
  return phases;
}

// Sum up the time of each phase: [phase, us], in the order in which they come first.
export function phaseTotals(phases) {
  const totals = new Map();
  for (const { phase, us } of phases) totals.set(phase, (totals.get(phase) ?? 0) + us);
  return [...totals];
}
