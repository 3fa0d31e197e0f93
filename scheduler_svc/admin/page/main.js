// The live page: asks AdminService once an interval and shows what it says. Read next: poller.js, then a view.

import { call, hasToken, CallError, UnreachableError } from "./wire.js";
import { byId, setSentence, setText } from "./dom.js";
import { sentence } from "./format.js";
import { watchPalette } from "./palette.js";
import { Poller } from "./poller.js";
import { Rates } from "./rates.js";
import { showOverview, showFreshness } from "./overview.js";
import { showFronts } from "./front_list.js";
import { ExecutorCards } from "./executor_cards.js";
import { StepTimeline } from "./step_timeline.js";
import { showStepPanel, hideStepPanel, showStepsSummary, showExecutorChoice, pointAtStep } from "./step_panel.js";
import { showBlockPanel, hideBlockPanel, blockTip } from "./block_panel.js";
import { RequestList } from "./request_list.js";
import { RequestLife } from "./request_life.js";
import { listenToControls, requestInHash, setRequestInHash } from "./controls.js";

const MOST_REQUESTS = 500; // that live, on one page of ListRequests
const MOST_QUEUED = 200;
const MOST_ENDED = 200;
const MOST_STEPS = 256; // as many as are kept
const CLOCK_MS = 250; // how often the age of the data is written anew
const HOVER_MS = 120; // a pointer that only passes over a block asks nothing
const NO_BLOCKS = new Set();

class LivePage {
  constructor() {
    this.rates = new Rates();
    this.state = null;
    this.answeredAtMs = null; // performance.now() of the last state
    this.problem = "";
    this.executor = null; // whose steps are shown
    this.requestId = null; // the selected request
    this.request = null; // its last picture
    this.lostRequestId = null; // a request that the scheduler does not know
    this.block = null; // { address, block } of the panel
    this.hover = 0;
    this.poller = new Poller(() => this.refresh(), () => this.showClock());
    this.cards = new ExecutorCards({
      openBlock: (address, block) => this.openBlock(address, block),
      describeBlock: (address, block) => this.describeBlock(address, block),
      onScreenChanged: () => this.state && this.poller.nextAtMs && this.poller.ask(),
    });
    this.timeline = new StepTimeline(byId("steps"), (step, box) => pointAtStep(step, box), (step) => this.openStep(this.executor, step.id));
    this.list = new RequestList((id) => this.openRequest(id));
    this.life = new RequestLife({
      openBlock: (address, block) => this.openBlock(address, block),
      openStep: (address, stepId) => this.openStep(address, stepId),
      stateOf: (address, block) => this.cards.stateOf(address, block),
      askAgain: () => this.poller.ask(),
    });
    watchPalette(() => {
      this.cards.repaint();
      this.timeline.draw();
    });
    listenToControls(this, this.poller);
    this.selectRequest(requestInHash());
    setInterval(() => this.showClock(), CLOCK_MS);
    this.poller.ask();
  }

  // One round of questions. The first one finds out whether anybody answers.
  async refresh() {
    try {
      const state = await call("GetSchedulerState");
      const startMs = performance.now();
      this.takeState(state);
      measure("octavo-state", startMs);
      const rounds = await Promise.allSettled([this.refreshRequests(), this.refreshSteps(), this.refreshMaps(), this.refreshRequest(), this.refreshBlock()]);
      const failed = rounds.find((round) => round.status === "rejected");
      if (failed) throw failed.reason;
      this.problem = "";
      return true;
    } catch (error) {
      return this.takeProblem(error);
    } finally {
      this.showClock();
    }
  }

  takeState(state) {
    this.state = state;
    this.answeredAtMs = performance.now();
    this.rates.add(state);
    byId("token-form").hidden = true;
    const addresses = (state.executors ?? []).map((executor) => executor.address);
    if (!addresses.includes(this.executor)) this.executor = addresses[0] ?? null;
    showOverview(state, this.rates);
    this.cards.show(state.executors ?? [], this.rates);
    showFronts(state.fronts ?? [], this.rates);
    showExecutorChoice(addresses, this.executor);
  }

  // Say what went wrong; return false: the poller is to wait longer before it asks again.
  takeProblem(error) {
    if (error instanceof UnreachableError) {
      this.problem = "The scheduler does not respond.";
      return false;
    }
    if (!(error instanceof CallError)) {
      console.error(error);
      this.problem = sentence(`this page has a bug: ${error.message}`);
      return false;
    }
    const isUnauthenticated = ["unauthenticated", "permission_denied"].includes(error.code);
    if (isUnauthenticated) this.askForToken(error);
    this.problem = isUnauthenticated ? "" : sentence(`the scheduler returned ${error.code}: ${error.message}`);
    return false;
  }

  askForToken(error) {
    const form = byId("token-form");
    if (form.hidden) {
      form.hidden = false;
      byId("token").focus();
    }
    setText(byId("token-error"), hasToken() ? error.message : "");
  }

  async refreshRequests() {
    const [queue, live, ended] = await Promise.all([
      call("ListQueue", { pageSize: MOST_QUEUED }), call("ListRequests", { pageSize: MOST_REQUESTS }),
      call("ListEndedRequests", { numRequests: MOST_ENDED }),
    ]);
    const startMs = performance.now();
    this.list.show({ state: this.state, queue: queue.requests ?? [], live: live.requests ?? [], ended: ended.requests ?? [] });
    measure("octavo-requests", startMs);
  }

  async refreshSteps() {
    const address = this.executor;
    if (address === null) return;
    const response = await absentWhen("not_found", call("ListSteps", { executor: address, numSteps: MOST_STEPS }));
    if (address !== this.executor) return;
    const steps = response?.steps ?? [];
    const startMs = performance.now();
    this.timeline.show(steps, `${address} ${response?.epoch}`);
    showStepsSummary(this.timeline);
    measure("octavo-steps", startMs);
  }

  async refreshMaps() {
    await Promise.all(this.cards.onScreenAddresses.map(async (address) => {
      const response = await absentWhen("unavailable", absentWhen("not_found", call("GetBlockMap", { executor: address })));
      if (!response) return;
      const startMs = performance.now();
      this.cards.showMap(address, response, this.blocksOn(address));
      measure("octavo-block-map", startMs);
    }));
  }

  async refreshRequest() {
    const id = this.requestId;
    if (id === null || (id === this.lostRequestId && !this.list.has(id))) return;
    try {
      const [answer, explained] = await Promise.all([call("GetRequest", { requestId: id }), call("ExplainRequest", { requestId: id })]);
      if (id !== this.requestId) return;
      this.request = answer.request;
      this.life.show(answer.request, explained);
    } catch (error) {
      if (!["not_found", "invalid_argument"].includes(error.code) || id !== this.requestId) throw error;
      this.request = null;
      this.lostRequestId = id;
      this.life.showSentence(id, sentence(error.message));
    }
    this.cards.highlight((address) => this.blocksOn(address));
    byId("legend-selected").hidden = this.request === null;
  }

  async refreshBlock() {
    if (this.block === null) return;
    const { address, block } = this.block;
    const found = await this.askBlock(address, block);
    if (this.block?.address === address && this.block.block === block) {
      showBlockPanel(address, block, found, (id) => this.openRequest(id));
    }
  }

  // Return { response } of GetBlock, or { problem }.
  async askBlock(address, block) {
    try {
      return { response: await call("GetBlock", { executor: address, block }) };
    } catch (error) {
      if (error instanceof CallError) return { problem: sentence(error.message) };
      throw error;
    }
  }

  async describeBlock(address, block) {
    const hover = ++this.hover;
    await new Promise((resolve) => setTimeout(resolve, HOVER_MS));
    if (hover !== this.hover) return null;
    const { response, problem } = await this.askBlock(address, block).catch((error) => ({ problem: error.message }));
    if (hover !== this.hover) return null;
    return problem ?? blockTip(response);
  }

  // Blocks of an executor that the selected request has.
  blocksOn(address) {
    if (this.request?.executor !== address) return NO_BLOCKS;
    return new Set((this.request.sequences ?? []).flatMap((sequence) => sequence.blockTable ?? []).filter((block) => block >= 0));
  }

  // What people choose ------------------------------------------------------------------------

  openRequest(id) {
    if (!setRequestInHash(id)) this.selectRequest(id);
  }

  selectRequest(id) {
    this.requestId = id;
    this.request = null;
    this.lostRequestId = null;
    this.list.select(id);
    byId("search-id").value = id ?? "";
    byId("legend-selected").hidden = true;
    this.cards.highlight(() => NO_BLOCKS);
    if (id === null) {
      this.life.hide();
      return;
    }
    this.life.showSentence(id, "…");
    this.poller.ask();
    byId("request").scrollIntoView({ block: "nearest" });
  }

  openBlock(address, block) {
    this.block = { address, block };
    this.askPart(() => this.refreshBlock(), "block");
  }

  async openStep(address, stepId) {
    if (address !== this.executor) this.chooseExecutor(address);
    this.timeline.pick(stepId);
    await this.askPart(async () => {
      try {
        const { step } = await call("GetStep", { executor: address, stepId });
        showStepPanel(stepId, { step });
      } catch (error) {
        if (!(error instanceof CallError)) throw error;
        showStepPanel(stepId, { problem: sentence(error.message) });
      }
    }, "step");
  }

  // Ask for a part of the page out of turn, and bring it into view.
  async askPart(ask, id) {
    try {
      await ask();
      byId(id).scrollIntoView({ block: "nearest" });
    } catch (error) {
      this.takeProblem(error);
      this.showClock();
    }
  }

  chooseExecutor(address) {
    this.executor = address;
    byId("steps-executor").value = address;
    this.closeStep();
    this.poller.ask();
  }

  closeStep() {
    hideStepPanel();
    this.timeline.pick(null);
  }

  closeBlock() {
    this.block = null;
    hideBlockPanel();
  }

  showClock() {
    const { answeredAtMs, problem } = this;
    showFreshness({ answeredAtMs, problem, isPaused: this.poller.isPaused, nextAtMs: this.poller.nextAtMs });
    document.body.classList.toggle("stale", Boolean(problem));
    document.body.classList.toggle("unknown", this.state === null);
  }
}

// Resolve to undefined if a call ends with this code: what it asks about has just gone.
async function absentWhen(code, answer) {
  try {
    return await answer;
  } catch (error) {
    if (error.code === code) return undefined;
    throw error;
  }
}

// Leave a mark of how long something took for the browser's performance tools.
function measure(name, startMs) {
  performance.measure(name, { start: startMs });
  performance.clearMeasures(name);
}

new LivePage();
