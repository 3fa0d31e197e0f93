// One request: why it waits or how far it is, what happened to it, and its sequences with their blocks.

import { number, enumName } from "./wire.js";
import { byId, element, fillFacts, linkButton, setText, syncChildren } from "./dom.js";
import { count, counted, sentence, span, spanMs } from "./format.js";
import { PHASE_NAMES, phasesOf, phaseTotals } from "./phases.js";
import { BLOCK_STATES } from "./palette.js";

const FIRST_BLOCKS = 48; // shown of a block table, until all are asked for
const ENDS = ["REQUEST_EVENT_KIND_FINISHED", "REQUEST_EVENT_KIND_FAILED"];

export class RequestLife {
  // `actions.openBlock(executor, block)`, `actions.openStep(executor, stepId)`; `actions.stateOf(executor, block)` is
  // the BlockState that the map shows, or undefined.
  constructor(actions) {
    this.actions = actions;
    this.wholeTables = new Set(); // sequences of which all blocks are shown
  }

  hide() {
    byId("request").hidden = true;
    byId("request-hint").hidden = false;
  }

  // Show that a request is looked for, or what is wrong with it.
  showSentence(requestId, text) {
    this.open(requestId);
    setText(byId("explanation"), text);
    byId("request-status").hidden = true;
    byId("request-body").hidden = true;
  }

  // Show the responses of GetRequest and ExplainRequest.
  show(request, explained) {
    this.open(request.requestId);
    byId("request-body").hidden = false;
    setText(byId("explanation"), sentence(explained.explanation ?? ""));
    const chip = byId("request-status");
    chip.hidden = false;
    setText(chip, request.statusText);
    chip.className = `chip ${request.statusText === "failed" ? "bad" : ""}`;
    showFits(explained.executors ?? []);
    const events = request.events ?? [];
    const nowUs = number(request.ageMs) * 1000;
    showPhases(phasesOf(events, nowUs));
    this.showEvents(events, nowUs);
    fillFacts(byId("request-facts"), requestFacts(request));
    this.showSequences(request);
  }

  open(requestId) {
    byId("request").hidden = false;
    byId("request-hint").hidden = true;
    if (byId("request-title").textContent === requestId) return;
    setText(byId("request-title"), requestId);
    this.wholeTables.clear();
    byId("sequences").replaceChildren();
    byId("sequences").nodesByKey?.clear();
    byId("events").replaceChildren();
    byId("events").nodesByKey?.clear();
  }

  showEvents(events, nowUs) {
    const rows = events.map((event, i) => {
      const atUs = number(event.sinceArrivalUs);
      const isLast = i + 1 === events.length;
      const untilUs = isLast ? Math.max(nowUs, atUs) : number(events[i + 1].sinceArrivalUs);
      return { event, key: `${i} ${event.kind} ${atUs}`, atUs, us: untilUs - atUs, isEnd: ENDS.includes(event.kind), isLast };
    });
    syncChildren(byId("events"), rows, (row) => row.key, (row) => this.createEvent(row), (node, row) => {
      setText(node.lastElementChild, row.isEnd ? "" : `${row.isLast ? "for " : ""}${span(row.us)}`);
    });
  }

  createEvent({ event, atUs }) {
    const kind = enumName(event.kind, "REQUEST_EVENT_KIND_");
    const text = element("p", {}, event.text ?? kind);
    const place = element("p", { className: "quiet" });
    if (event.stepId !== undefined && event.executor) {
      place.append(linkButton(`step ${count(Number(event.stepId))}`, () => this.actions.openStep(event.executor, event.stepId)), ` of ${event.executor}`);
    } else if (event.executor) place.append(event.executor);
    return element("li", { className: `event ${kind.replaceAll(" ", "-")}` },
      element("time", {}, `+${span(atUs)}`), element("i"), element("div", {}, text, place), element("span", { className: "quiet" }));
  }

  showSequences(request) {
    const sequences = (request.sequences ?? []).map((sequence) => ({ sequence, request }));
    const keyOf = ({ sequence }) => number(sequence.outputIndex);
    syncChildren(byId("sequences"), sequences, keyOf, (item) => this.createSequence(keyOf(item), request.beamSearch),
      (node, item) => this.updateSequence(node, item, keyOf(item)));
  }

  createSequence(index, isBeam) {
    const more = linkButton("", () => {
      this.wholeTables.add(index);
      this.actions.askAgain();
    });
    return element("div", { className: "sequence" }, element("h3", {}, `${isBeam ? "Beam" : "Output"} ${index}`),
      element("p", { className: "quiet" }), element("div", { className: "blocks" }), more);
  }

  updateSequence(node, { sequence, request }, index) {
    const [, about, blocks, more] = node.children;
    setText(about, sequenceText(sequence));
    const table = (sequence.blockTable ?? []).map((block, at) => ({ block, at, host: sequence.hostBlockTable?.[at] ?? -1 }));
    const shown = this.wholeTables.has(index) ? table : table.slice(0, FIRST_BLOCKS);
    syncChildren(blocks, shown, ({ at, block, host }) => `${at} ${block} ${host}`,
      (place) => this.createBlock(request.executor, place), (chip, { block }) => this.colour(chip, request.executor, block));
    more.hidden = shown.length === table.length;
    setText(more, `all ${counted(table.length, "block")}`);
  }

  createBlock(executor, { block, at, host }) {
    if (block < 0) {
      const place = host < 0 ? "outside the sliding window" : `block ${host} of the host cache`;
      return element("span", { className: "block gone", title: `its block ${at}: ${place}` }, host < 0 ? "–" : `h${host}`);
    }
    return linkButton(String(block), () => this.actions.openBlock(executor, block), { className: "block", title: `its block ${at}: block ${block}` });
  }

  colour(chip, executor, block) {
    if (block < 0) return;
    const state = this.actions.stateOf(executor, block);
    chip.className = state ? `block block-${BLOCK_STATES[state]}` : "block";
  }
}

function showPhases(phases) {
  const shown = phases.map((phase, i) => ({ ...phase, key: `${i} ${phase.phase}` }));
  const band = byId("phases");
  const totals = phaseTotals(phases);
  band.setAttribute("aria-label", totals.map(([phase, us]) => `${PHASE_NAMES[phase]} ${span(us)}`).join(", "));
  syncChildren(band, shown, ({ key }) => key, ({ phase }) => element("i", { className: phase }),
    (node, { us }) => { node.style.flexGrow = Math.max(us, 1); });
  syncChildren(byId("phase-legend"), totals, ([phase]) => phase,
    ([phase]) => element("li", {}, element("i", { className: `swatch ${phase}` }), element("span")),
    (node, [phase, us]) => setText(node.lastElementChild, `${PHASE_NAMES[phase]} ${span(us)}`));
}

function showFits(fits) {
  const table = byId("fits");
  table.hidden = fits.length === 0;
  const needed = (need, free) => `${count(number(need))} needed, ${count(number(free))} free`;
  syncChildren(table.tBodies[0], fits, (fit) => fit.executor,
    (fit) => element("tr", {}, element("th", { scope: "row" }, fit.executor), element("td"), element("td"), element("td")),
    (row, fit) => [
      needed(fit.numNeededBlocks, fit.numFreeBlocks), needed(fit.numNeededSlots, fit.numFreeSlots), fit.obstacle || "nothing",
    ].forEach((text, i) => setText(row.children[i + 1], text)));
}

function requestFacts(request) {
  const ms = (value) => (value === undefined ? "" : spanMs(number(value)));
  const preemptions = number(request.numPreemptions), losses = number(request.numLosses);
  const beams = request.beamSearch;
  // The events have microseconds, as the band above.
  const until = (kind, milliseconds) => {
    const event = (request.events ?? []).find((each) => each.kind === `REQUEST_EVENT_KIND_${kind}`);
    return event ? span(number(event.sinceArrivalUs)) : ms(milliseconds);
  };
  return [
    ["Prompt", counted(number(request.numPromptTokens), "token")],
    ["From cache", number(request.numCachedTokens) ? counted(number(request.numCachedTokens), "token") : ""],
    ["Output", counted(number(request.numOutputTokens), "token")],
    ["From drafts", number(request.numDraftTokens) ? counted(number(request.numDraftTokens), "token") : ""],
    ["Queued", until("ADMITTED", request.queueMs)],
    ["First token after", until("FIRST_TOKEN", request.timeToFirstTokenMs)],
    ["Last token", request.lastTokenAgeMs === undefined ? "" : `${ms(request.lastTokenAgeMs)} ago`],
    [request.endedAgoMs === undefined ? "Age" : "Took", ms(request.ageMs ?? 0)],
    ["Ended", request.endedAgoMs === undefined ? "" : `${ms(request.endedAgoMs)} ago`],
    ["Executor", request.executor ?? ""],
    ["Tenant", request.tenant ?? ""],
    ["Priority", request.priority ? String(request.priority) : ""],
    ["Preempted", preemptions ? counted(preemptions, "time") : ""],
    ["Executors lost", losses ? String(losses) : ""],
    ["Beam search", beams ? `${number(beams.beamWidth)} beams, ${counted((beams.hypotheses ?? []).length, "hypothesis").replace("hypothesiss", "hypotheses")}` : ""],
  ];
}

function sequenceText(sequence) {
  const status = enumName(sequence.status, "SEQUENCE_STATUS_");
  const slot = sequence.slot === undefined ? "" : `, slot ${sequence.slot}`;
  const tokens = sequence.numTokens ? `, ${count(number(sequence.numComputedTokens))} of ${counted(number(sequence.numTokens), "token")} computed` : "";
  const late = sequence.numLateTokens ? `, ${counted(sequence.numLateTokens, "token")} in flight` : "";
  return status + slot + tokens + late;
}
