// A card for each executor, with its block map. Only maps on the screen are fetched.

import { number, bytes } from "./wire.js";
import { element, setSentence, setText, syncChildren, byId } from "./dom.js";
import { count, counted, rate, share, spanMs } from "./format.js";
import { BlockMap } from "./block_map.js";
import { BLOCK_STATES } from "./palette.js";
import { showTip, hideTip } from "./tip.js";

const MAP_HEIGHT = 220; // CSS pixels, of few executors
const LOW_MAP_HEIGHT = 120; // of many
const MANY = 7;
const MARGIN = "200px"; // maps so far from the screen count as on it

// One ExecutorState, and its map.
class ExecutorCard {
  constructor(address, actions) {
    this.address = address;
    this.actions = actions;
    this.isOnScreen = false;
    this.isAttached = false;
    this.name = element("h3", {}, address);
    this.chip = element("span", { className: "chip" });
    this.trouble = element("p", { className: "sentence trouble" });
    this.numbers = element("dl", { className: "numbers" });
    this.canvas = element("canvas", { tabIndex: 0, role: "application", "aria-describedby": "tip" });
    this.canvas.setAttribute("aria-label", `Blocks of ${address}; arrow keys move, Enter shows who has a block`);
    this.mapBox = element("div", { className: "canvas-box" }, this.canvas);
    this.bars = element("div", { className: "bars" });
    this.node = element("article", { className: "card" }, element("div", { className: "heading" }, this.name, this.chip),
      this.trouble, this.numbers, this.mapBox, this.bars);
    this.map = new BlockMap(this.canvas, (block) => this.point(block), (block) => actions.openBlock(address, block));
  }

  update(executor, tokensPerSecond, mapHeight) {
    this.isAttached = Boolean(executor.instanceId);
    this.map.setMaxHeight(mapHeight);
    const losses = number(executor.numLosses);
    setText(this.chip, executor.statusText + (losses ? `, lost ${counted(losses, "time")}` : ""));
    this.chip.className = `chip ${this.isAttached ? "good" : "bad"}`;
    setSentence(this.trouble, this.isAttached ? executor.warning ?? "" : executor.lastError || "The scheduler is trying to connect.");
    for (const part of [this.numbers, this.mapBox, this.bars]) part.hidden = !this.isAttached;
    if (!this.isAttached) return;
    syncChildren(this.numbers, numbersOf(executor, tokensPerSecond), ([name]) => name, createNumber, updateNumber);
    syncChildren(this.bars, barsOf(executor), ({ name }) => name, createBar, updateBar);
  }

  // Show the states of a GetBlockMap response.
  showMap(states, highlighted) {
    this.map.show(states, highlighted);
    if (this.pointed !== undefined && this.pointed !== null) this.point(this.pointed);
  }

  async point(block) {
    const isNew = block !== this.pointed;
    this.pointed = block;
    if (block === null) {
      hideTip();
      return;
    }
    const state = BLOCK_STATES[this.map.states[block]];
    if (isNew) this.pointedText = "";
    this.tip(block, state);
    const text = await this.actions.describeBlock(this.address, block);
    if (this.pointed !== block || text === null) return;
    this.pointedText = text;
    this.tip(block, state);
  }

  tip(block, state) {
    const cell = this.map.cellOf(block);
    const box = { x: cell.x, y: cell.y, width: cell.size, height: cell.size };
    showTip(this.canvas, box, [`Block ${count(block)}: ${state}`, ...(this.pointedText ? [this.pointedText] : [])]);
  }
}

export class ExecutorCards {
  // `actions.openBlock(address, block)` shows a block; `actions.describeBlock(address, block)` resolves to a sentence
  // about it, or to null if another one has been asked for since.
  constructor(actions) {
    this.actions = actions;
    this.cards = new Map();
    this.observer = new IntersectionObserver((entries) => this.onScreen(entries), { rootMargin: MARGIN });
  }

  // Show the executors of a GetSchedulerState response.
  show(executors, rates) {
    const mapHeight = executors.length < MANY ? MAP_HEIGHT : LOW_MAP_HEIGHT;
    syncChildren(byId("executors"), executors, (executor) => executor.address,
      (executor) => this.create(executor.address),
      (node, executor) => this.cards.get(executor.address).update(executor, rates.ofExecutor(executor.address), mapHeight));
    for (const [address, card] of this.cards) if (!card.node.isConnected) this.forget(address, card);
    byId("executors-empty").hidden = executors.length > 0;
    const numAttached = executors.filter((executor) => executor.instanceId).length;
    setText(byId("executors-summary"), `${count(numAttached)} of ${count(executors.length)} attached`);
  }

  // Addresses whose block maps are to be fetched.
  get onScreenAddresses() {
    return [...this.cards.values()].filter((card) => card.isOnScreen && card.isAttached).map((card) => card.address);
  }

  // Show a GetBlockMap response; `highlighted` are blocks of it.
  showMap(address, response, highlighted) {
    // Blocks of the encoder are counted on behind those of the device pool.
    const [states, encoder] = [bytes(response.states), bytes(response.encoderStates)];
    const all = new Uint8Array(states.length + encoder.length);
    all.set(states);
    all.set(encoder, states.length);
    this.cards.get(address)?.showMap(all, highlighted);
  }

  // Highlight other blocks of the maps that are shown; `blocksOf(address)` names them.
  highlight(blocksOf) {
    for (const card of this.cards.values()) card.map.show(card.map.states, blocksOf(card.address));
  }

  // The BlockState of a block as it was shown last; undefined: it has not been shown.
  stateOf(address, block) {
    return this.cards.get(address)?.map.states[block];
  }

  repaint() {
    for (const card of this.cards.values()) card.map.repaint();
  }

  create(address) {
    const card = new ExecutorCard(address, this.actions);
    this.cards.set(address, card);
    this.observer.observe(card.node);
    return card.node;
  }

  forget(address, card) {
    this.observer.unobserve(card.node);
    this.cards.delete(address);
  }

  onScreen(entries) {
    for (const entry of entries) {
      for (const card of this.cards.values()) if (card.node === entry.target) card.isOnScreen = entry.isIntersecting;
    }
    this.actions.onScreenChanged();
  }
}

function numbersOf(executor, tokensPerSecond) {
  const oldest = executor.oldestStepAgeMs === undefined ? "" : `, oldest ${spanMs(number(executor.oldestStepAgeMs))}`;
  const most = executor.maxStepsInFlight === undefined ? "" : ` of ${count(number(executor.maxStepsInFlight))}`;
  return [
    ["Running", count(number(executor.numRunningRequests))],
    ["Free slots", `${count(number(executor.numFreeSlots))} of ${count(number(executor.numSlots))}`],
    ["Swapped", count(number(executor.numSwappedRequests))],
    ["Tokens/s", tokensPerSecond === undefined ? "–" : rate(tokensPerSecond)],
    ["Steps in flight", `${count(number(executor.numStepsInFlight))}${most}${oldest}`],
    ["Round trip", executor.roundTripUs === undefined ? "–" : `${(number(executor.roundTripUs) / 1000).toFixed(1)} ms`],
  ];
}

function createNumber([name]) {
  return element("div", {}, element("dt", {}, name), element("dd"));
}

function updateNumber(node, [, value]) {
  setText(node.lastElementChild, value);
}

// A bar for the device pool, and one for the host pool if there is one.
function barsOf(executor) {
  const [all, free, used, cached, shared] = ["Blocks", "FreeBlocks", "UsedBlocks", "CachedBlocks", "SharedBlocks"].map(
    (name) => number(executor[`num${name}`]));
  const bars = [{ name: "Device", all, used, parts: [["shared", shared], ["used", used - shared], ["cached", cached], ["free", free - cached]] }];
  const [numHost, usedHost, cachedHost] = ["HostBlocks", "UsedHostBlocks", "CachedHostBlocks"].map((name) => number(executor[`num${name}`]));
  const hostParts = [["used", usedHost], ["cached", cachedHost], ["free", numHost - usedHost - cachedHost]];
  const [numEncoder, usedEncoder, cachedEncoder] = ["EncoderBlocks", "UsedEncoderBlocks", "CachedEncoderBlocks"].map((name) => number(executor[`num${name}`]));
  const encoderParts = [["used", usedEncoder], ["cached", cachedEncoder], ["free", numEncoder - usedEncoder - cachedEncoder]];
  if (numEncoder) bars.push({ name: "Encoder", all: numEncoder, used: usedEncoder, parts: encoderParts });
  if (numHost) bars.push({ name: "Host", all: numHost, used: usedHost, parts: hostParts });
  return bars;
}

function createBar({ name }) {
  return element("div", {}, element("p", { className: "bar-name" }, element("span", {}, name), element("strong")),
    element("div", { className: "stack", role: "img" }), element("ul", { className: "legend" }));
}

function updateBar(node, { name, all, used, parts }) {
  const [title, stack, legend] = node.children;
  setText(title.lastElementChild, share(used, all));
  const words = parts.map(([state, number]) => `${count(number)} ${state}`);
  stack.setAttribute("aria-label", `${name} pool: ${words.join(", ")}`);
  syncChildren(stack, parts, ([state]) => state, ([state]) => element("i", { className: `block-${state}` }),
    (part, [, number]) => { part.style.flexGrow = number; });
  syncChildren(legend, parts, ([state]) => state,
    ([state]) => element("li", {}, element("i", { className: `swatch block-${state}` }), element("span")),
    (item, [state, number]) => setText(item.lastElementChild, `${count(number)} ${state}`));
}
