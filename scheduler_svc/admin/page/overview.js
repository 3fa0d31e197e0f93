// The bar at the top and the totals below it.

import { number } from "./wire.js";
import { byId, element, setSentence, setText, syncChildren } from "./dom.js";
import { count, counted, rate, share, spanMs } from "./format.js";

// Show a GetSchedulerState response.
export function showOverview(state, rates) {
  showReadiness(state.statusText);
  setText(byId("model"), (state.executors ?? []).find((executor) => executor.modelId)?.modelId ?? "");
  setText(byId("version"), state.version ?? "");
  setText(byId("uptime"), `up ${spanMs(number(state.uptimeMs))}`);
  syncChildren(byId("totals"), tiles(state, rates), ([name]) => name, createTile, updateTile);
}

// Say how old the data is, and what is wrong if something is.
export function showFreshness({ answeredAtMs, isPaused, problem, nextAtMs }) {
  const nowMs = performance.now();
  const age = answeredAtMs === null ? "" : ago(nowMs - answeredAtMs);
  setText(byId("data-age"), isPaused ? `paused, ${age}` : age);
  const waitS = Math.max(0, Math.ceil((nextAtMs - nowMs) / 1000));
  const next = nextAtMs ? ` The next try is in ${counted(waitS, "second")}.` : "";
  setSentence(byId("notice"), problem && problem + next);
  if (problem) showReadiness("no response");
}

function showReadiness(text) {
  const chip = byId("readiness");
  setText(chip, text);
  chip.className = `chip ${text === "ready" ? "good" : "bad"}`;
}

function ago(ms) {
  return ms < 2000 ? "live" : `${spanMs(Math.round(ms / 1000) * 1000)} old`;
}

function tiles(state, rates) {
  const total = (name) => count(number(state[name]));
  const perSecond = (value) => (value === undefined ? "–" : rate(value));
  return [
    ["Output tokens/s", perSecond(rates.output), `${total("numOutputTokens")} total`],
    ["Prompt tokens/s", perSecond(rates.prompt), `${total("numPromptTokens")} total`],
    ["Running", total("numRunningRequests"), `${total("numSwappedRequests")} swapped`],
    ["Waiting", total("numWaitingRequests"), `${total("numParkedRequests")} of them quarantined`],
    ["Finished", total("numFinishedRequests"), `${total("numFailedRequests")} failed`],
    ["Blocks in use", share(number(state.numUsedBlocks), number(state.numBlocks)), `of ${total("numBlocks")}`],
    ["Prefix cache hits", share(number(state.numHitTokens), number(state.numQueriedTokens)), hitsText(state)],
    ["Preemptions", total("numPreemptions"), `${total("numSwapPreemptions")} swapped out`],
    ...((state.executors ?? []).some((executor) => number(executor.numDraftTokens)) ? [draftsTile(rates)] : []),
  ];
}

function hitsText(state) {
  const withStates = (state.executors ?? []).filter((executor) => executor.hasStates);
  if (withStates.some((executor) => !number(executor.numStateBlocks))) return "none: no states are saved";
  const places = [[state.numHostHitTokens, "from the host"], [state.numPulledHitTokens, "pulled"]].filter(([tokens]) => number(tokens));
  const moved = places.map(([tokens, where]) => `, ${share(number(tokens), number(state.numQueriedTokens))} ${where}`).join("");
  const tokens = `of ${count(number(state.numQueriedTokens))} tokens${moved}`;
  const numSaved = withStates.reduce((sum, executor) => sum + number(executor.numSavedStates), 0);
  return withStates.length ? `${tokens}; ${count(numSaved)} states saved` : tokens;
}

function draftsTile(rates) {
  const [drafts, accepted, computed] = rates.drafts;
  const perStep = computed ? (computed / (computed - accepted)).toFixed(1) : "–";
  return ["Drafts right", drafts ? share(accepted, drafts) : "–", `${perStep} tokens a step of a sequence`];
}

function createTile([name]) {
  return element("div", {}, element("dt", {}, name), element("dd", { className: "value" }), element("dd", { className: "quiet" }));
}

function updateTile(tile, [, value, more]) {
  setText(tile.children[1], value);
  setText(tile.children[2], more);
}
