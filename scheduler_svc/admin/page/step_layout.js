// Where steps are on the time axis. Long idle times are cut short, so that a burst is seen as well as a steady stream.

import { number } from "./wire.js";

const MIN_CUT_US = 5_000; // shorter idle times are drawn to scale
const CUT_SHARE = 0.05; // and those that are a smaller share of the busy time
const CUT_WIDTH = 30; // CSS pixels
const MAX_CUTS_SHARE = 0.4; // of the width, for all cuts together

// Turn StepSummary messages into { id, text, kind, startUs, endUs, executeUs, isDone, lane }, oldest first.
export function readSteps(summaries) {
  const steps = summaries.map((summary) => {
    const startUs = number(summary.decidedAtUs);
    const isDone = summary.roundTripUs !== undefined;
    return {
      id: summary.stepId, text: summary.text, kind: kindOf(summary), startUs, isDone,
      endUs: startUs + number(summary.roundTripUs), executeUs: number(summary.executeDurationUs),
    };
  });
  const nowUs = Math.max(0, ...steps.map((step) => Math.max(step.endUs, step.startUs + 1000)));
  for (const step of steps) if (!step.isDone) step.endUs = nowUs;
  setLanes(steps);
  return steps;
}

// Return { x(us), cuts: [{ x, width, us }], busyUs } that places these steps on `width` pixels.
export function timeAxis(steps, width) {
  const spans = busySpans(steps);
  const busyUs = spans.reduce((sum, span) => sum + span.endUs - span.startUs, 0);
  const limitUs = Math.max(MIN_CUT_US, CUT_SHARE * busyUs);
  const gaps = spans.slice(1).map((span, i) => ({ fromUs: spans[i].endUs, us: span.startUs - spans[i].endUs }));
  const cutGaps = gaps.filter((gap) => gap.us > limitUs);
  const cutWidth = Math.min(CUT_WIDTH, (MAX_CUTS_SHARE * width) / Math.max(1, cutGaps.length));
  const firstUs = spans.length ? spans[0].startUs : 0;
  const lastUs = spans.length ? spans.at(-1).endUs : 1;
  const cutUs = cutGaps.reduce((sum, gap) => sum + gap.us, 0);
  const scale = (width - cutGaps.length * cutWidth) / Math.max(1, lastUs - firstUs - cutUs);
  const cuts = [];
  let skippedUs = 0;
  for (const gap of cutGaps) {
    cuts.push({ x: (gap.fromUs - firstUs - skippedUs) * scale + cuts.length * cutWidth, width: cutWidth, ...gap });
    skippedUs += gap.us;
  }
  const x = (us) => {
    let at = (us - firstUs) * scale;
    for (const cut of cuts) {
      if (us <= cut.fromUs) break;
      at += us >= cut.fromUs + cut.us ? cut.width - cut.us * scale : -(us - cut.fromUs) * scale;
    }
    return at;
  };
  return { x, cuts, busyUs };
}

function kindOf(summary) {
  if (summary.numPrefillTokens) return summary.numDecodes ? "mixed" : "prefill";
  return summary.numDecodes ? "decode" : "other";
}

// Steps that are in flight together get lanes of their own; the first free one, from 0.
function setLanes(steps) {
  const endsUs = [];
  for (const step of steps) {
    const free = endsUs.findIndex((endUs) => endUs <= step.startUs);
    step.lane = free < 0 ? endsUs.length : free;
    endsUs[step.lane] = step.endUs;
  }
}

// Times in which any step was in flight, as few as there are.
function busySpans(steps) {
  const spans = [];
  for (const { startUs, endUs } of steps) {
    const last = spans.at(-1);
    if (last && startUs <= last.endUs) last.endUs = Math.max(last.endUs, endUs);
    else spans.push({ startUs, endUs });
  }
  return spans;
}
