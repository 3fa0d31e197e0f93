// What is around the timeline of steps: whose they are, what they come to, and one of them field by field.

import { number } from "./wire.js";
import { byId, element, fillFacts, setSentence, setText, syncChildren } from "./dom.js";
import { count, counted, share, size, span } from "./format.js";
import { showTip, hideTip } from "./tip.js";

const MOST_NAMED = 24; // of a list

// Offer the executors whose steps can be shown.
export function showExecutorChoice(addresses, chosen) {
  const select = byId("steps-executor");
  syncChildren(select, addresses, (address) => address, (address) => element("option", { value: address }, address), () => {});
  if (chosen !== null && select.value !== chosen) select.value = chosen;
}

// Say how many steps a StepTimeline shows, and how busy they kept the executor.
export function showStepsSummary(timeline) {
  const { length } = timeline.steps;
  const busy = `${counted(length, "step")} in ${span(timeline.wholeUs())}, ${share(timeline.executedShare(), 1)} of it executing`;
  setText(byId("steps-summary"), length ? busy : "");
  byId("steps-box").hidden = !length;
  setSentence(byId("steps-empty"), length ? "" : "No steps since this executor was attached.");
}

// Show the tip of a step at a box of the canvas; null: none.
export function pointAtStep(step, box) {
  if (!step) {
    hideTip();
    return;
  }
  const times = step.isDone ? `executed in ${span(step.executeUs)}, round trip ${span(step.endUs - step.startUs)}` : "in flight";
  showTip(byId("steps"), box, [`Step ${step.id}: ${step.text}`, times]);
}

// Show a GetStep response's step, or a problem in a sentence.
export function showStepPanel(stepId, { step, problem }) {
  byId("step").hidden = false;
  setText(byId("step-title"), `Step ${count(Number(stepId))}`);
  setText(byId("step-text"), problem ?? step.text);
  fillFacts(byId("step-facts"), step ? stepFacts(step) : []);
}

export function hideStepPanel() {
  byId("step").hidden = true;
}

function stepFacts(step) {
  const time = (us) => (us === undefined ? "no result yet" : span(number(us)));
  const slots = (list) => listed(list ?? [], count);
  return [
    ["Executed in", time(step.executeDurationUs)],
    ["Round trip", time(step.roundTripUs)],
    ["Message", size(number(step.requestBytes))],
    ["Epoch", count(number(step.epoch))],
    ["Sampled", step.numSampledTokens === undefined ? "" : counted(step.numSampledTokens, "token")],
    ["Candidates", step.numCandidates ? count(step.numCandidates) : ""],
    ["Decoded", slots(step.decodeSlots) && `slots ${slots(step.decodeSlots)}`],
    ["Prefilled", listed(step.prefillChunks ?? [], chunkText)],
    ["Admitted", listed(step.admissions ?? [], admissionText)],
    ["Forked", listed(step.forks ?? [], forkText)],
    ["Beams forked", listed(step.beamForks ?? [], forkText)],
    ["Beams continued", slots(step.continuedBeamSlots)],
    ["Released", slots(step.releasedSlots) && `slots ${slots(step.releasedSlots)}`],
    ["Swapped out", listed(step.blocksToSwapOut ?? [], moveText)],
    ["Swapped in", listed(step.blocksToSwapIn ?? [], moveText)],
    ["Copied", listed(step.blocksToCopy ?? [], moveText)],
  ];
}

function chunkText(chunk) {
  const start = number(chunk.start), end = start + number(chunk.numTokens);
  return `slot ${number(chunk.slot)}: tokens ${count(start)} to ${count(end - 1)}`;
}

function admissionText(admitted) {
  const ready = number(admitted.numComputedTokens);
  const computed = ready ? `, ${count(ready)} already computed` : "";
  return `slot ${number(admitted.slot)}: ${counted(number(admitted.numTokens), "token")}${computed}, ${counted(number(admitted.numBlocks), "block")}`;
}

function forkText(fork) {
  return `slot ${number(fork.slot)} from ${number(fork.parentSlot)}`;
}

function moveText(move) {
  return `${count(number(move.sourceBlock))} → ${count(number(move.targetBlock))}`;
}

function listed(items, textOf) {
  const texts = items.slice(0, MOST_NAMED).map(textOf);
  if (items.length > MOST_NAMED) texts.push(`and ${count(items.length - MOST_NAMED)} more`);
  return texts.join(textOf === count ? ", " : "; ");
}
