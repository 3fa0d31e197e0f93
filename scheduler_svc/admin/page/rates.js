// Tokens and drafts a second, from totals of the last few seconds. The time is the scheduler's own.

import { number } from "./wire.js";

const WINDOW_MS = 5_000;

export class Rates {
  constructor() {
    this.samples = [];
  }

  // Take the totals of a GetSchedulerState response.
  add(state) {
    const sumOf = (name) => (state.executors ?? []).reduce((sum, executor) => sum + number(executor[name]), 0);
    const sample = {
      drafts: sumOf("numDraftTokens"), accepted: sumOf("numAcceptedDraftTokens"), computed: sumOf("numOutputTokens"),
      uptimeMs: number(state.uptimeMs), prompt: number(state.numPromptTokens), output: number(state.numOutputTokens),
      executors: new Map((state.executors ?? []).map((e) => [e.address, number(e.numOutputTokens)])),
      fronts: new Map((state.fronts ?? []).map((f) => [f.frontId, number(f.numOutputTokens)])),
    };
    if (this.samples.at(-1)?.uptimeMs > sample.uptimeMs) this.samples = []; // another scheduler
    this.samples.push(sample);
    while (this.samples.length > 2 && sample.uptimeMs - this.samples[1].uptimeMs >= WINDOW_MS) this.samples.shift();
  }

  get prompt() {
    return this.rateOf((sample) => sample.prompt);
  }

  get output() {
    return this.rateOf((sample) => sample.output);
  }

  // Drafts, those of them that were right, and all tokens of executors.
  get drafts() {
    return ["drafts", "accepted", "computed"].map((name) => this.rateOf((sample) => sample[name]));
  }

  ofExecutor(address) {
    return this.rateOf((sample) => sample.executors.get(address));
  }

  ofFront(frontId) {
    return this.rateOf((sample) => sample.fronts.get(frontId));
  }

  // A second, since it has been counted at all; undefined while there is one sample of it only.
  rateOf(total) {
    const first = this.samples.find((sample) => total(sample) !== undefined), last = this.samples.at(-1);
    const ms = first ? last.uptimeMs - first.uptimeMs : 0;
    if (ms <= 0 || total(last) === undefined) return undefined;
    return (1000 * (total(last) - total(first))) / ms;
  }
}
