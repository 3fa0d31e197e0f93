// Asks again and again, one round at a time: not while it is paused or the tab is hidden, and less often while nobody answers.

const MAX_BACK_OFF_MS = 30_000;

export class Poller {
  // `refresh()` is one round; it resolves to whether somebody answered. `onChange()` is called when the plan changes.
  constructor(refresh, onChange) {
    this.refresh = refresh;
    this.onChange = onChange;
    this.intervalMs = 1000;
    this.isPaused = false;
    this.numFailures = 0;
    this.nextAtMs = 0; // performance.now() of the next round; 0: none is planned
    this.isRunning = false;
    this.isWanted = false;
    this.timer = undefined;
    this.numRounds = 0;
    document.addEventListener("visibilitychange", () => this.plan(0));
  }

  setInterval(ms) {
    this.intervalMs = ms;
    this.plan(0);
  }

  setPaused(isPaused) {
    this.isPaused = isPaused;
    this.plan(0);
  }

  // Ask once, at once, also while it is paused.
  async ask() {
    clearTimeout(this.timer);
    if (this.isRunning) {
      this.isWanted = true;
      return;
    }
    this.isRunning = true;
    const startMs = performance.now();
    this.numFailures = (await this.refresh()) ? 0 : this.numFailures + 1;
    this.isRunning = false;
    document.body.dataset.rounds = ++this.numRounds; // for tools that drive the page
    const passedMs = performance.now() - startMs;
    const backOffMs = Math.min(MAX_BACK_OFF_MS, this.intervalMs * 2 ** (this.numFailures - 1));
    if (this.isWanted) {
      this.isWanted = false;
      this.ask();
    } else this.plan(this.numFailures ? Math.max(backOffMs, this.intervalMs) : Math.max(0, this.intervalMs - passedMs));
  }

  // Make the next round come after so many milliseconds, if any is to come.
  plan(ms) {
    clearTimeout(this.timer);
    const isPlanned = !this.isPaused && !document.hidden;
    this.nextAtMs = isPlanned ? performance.now() + ms : 0;
    if (isPlanned && !this.isRunning) this.timer = setTimeout(() => this.ask(), ms);
    this.onChange();
  }
}
