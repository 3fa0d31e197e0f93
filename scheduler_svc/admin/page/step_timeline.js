// The last steps of an executor as bars over time: pale while a step is in flight, full while it is executed.

import { palette } from "./palette.js";
import { span } from "./format.js";
import { readSteps, timeAxis } from "./step_layout.js";

const HEIGHT = 64; // CSS pixels
const MAX_LANE_HEIGHT = 20;
const LANE_GAP = 3;
const PALE = 0.3;
const MAX_REACH = 24; // of the pointer to a bar, CSS pixels
const CUT_LABEL_WIDTH = 14; // narrower ones have none

export class StepTimeline {
  // `onPoint(step, box)` tells which step the pointer or the keyboard is at, or null; `onPick(step)` a choice.
  constructor(canvas, onPoint, onPick) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.steps = [];
    this.pointedId = null;
    this.pickedId = null;
    this.onPoint = onPoint;
    this.onPick = onPick;
    this.key = "";
    new ResizeObserver(() => this.layOut()).observe(canvas.parentElement);
    this.listen();
  }

  // Show the steps of a ListSteps response; `key` names what they are of. An unchanged list is not drawn again.
  show(summaries, key) {
    const last = summaries.at(-1);
    const newKey = `${key} ${last?.stepId} ${summaries.filter((step) => step.roundTripUs !== undefined).length}`;
    if (newKey === this.key) return;
    this.key = newKey;
    this.steps = readSteps(summaries);
    this.layOut();
  }

  // Mark the step whose details are shown; null: none.
  pick(stepId) {
    this.pickedId = stepId;
    this.draw();
  }

  // The time that the executor computed, as a share of the time since the first step, 0 to 1.
  executedShare() {
    if (!this.steps.length) return 0;
    const executedUs = this.steps.reduce((sum, step) => sum + step.executeUs, 0);
    return Math.min(1, executedUs / Math.max(1, this.wholeUs()));
  }

  // Time from the first decision to the last result, in microseconds.
  wholeUs() {
    return this.steps.length ? Math.max(...this.steps.map((step) => step.endUs)) - this.steps[0].startUs : 0;
  }

  // Where a step is, in CSS pixels of the canvas.
  boxOf(step) {
    const { axis, laneHeight } = this;
    const x = axis.x(step.startUs), right = axis.x(step.endUs);
    const executed = axis.x(step.endUs - Math.min(step.executeUs, step.endUs - step.startUs));
    const y = this.top + step.lane * (laneHeight + LANE_GAP);
    return { x, y, width: Math.max(1, right - x - 0.5), executed, height: laneHeight };
  }

  layOut() {
    const width = this.canvas.parentElement.clientWidth;
    if (!width) return;
    const ratio = devicePixelRatio || 1;
    const { canvas } = this;
    if (canvas.width !== Math.floor(width * ratio) || canvas.height !== Math.floor(HEIGHT * ratio)) {
      canvas.width = Math.floor(width * ratio);
      canvas.height = Math.floor(HEIGHT * ratio);
    }
    this.ratio = ratio;
    this.width = width;
    this.axis = timeAxis(this.steps, width);
    const numLanes = Math.max(1, ...this.steps.map((step) => step.lane + 1));
    this.laneHeight = Math.min(MAX_LANE_HEIGHT, (HEIGHT - 12) / numLanes - LANE_GAP);
    this.top = (HEIGHT - numLanes * (this.laneHeight + LANE_GAP) + LANE_GAP) / 2;
    this.draw();
  }

  draw() {
    const { context, ratio } = this;
    if (!this.axis) return;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.width, HEIGHT);
    this.axis.cuts.forEach((cut) => this.drawCut(cut));
    for (const step of this.steps) this.drawStep(step);
  }

  drawStep(step) {
    const { context } = this;
    const box = this.boxOf(step);
    context.fillStyle = palette.css[step.kind];
    context.globalAlpha = PALE;
    context.fillRect(box.x, box.y, box.width, box.height);
    context.globalAlpha = 1;
    if (step.executeUs) {
      context.fillRect(box.executed, box.y, Math.max(1, box.x + box.width - box.executed), box.height);
    }
    if (step.id !== this.pickedId && step.id !== this.pointedId) return;
    context.strokeStyle = palette.css.ink;
    context.lineWidth = 1.5;
    context.strokeRect(box.x - 1, box.y - 2, box.width + 2, box.height + 4);
  }

  drawCut({ x, width, us }) {
    const { context } = this;
    context.strokeStyle = palette.css.line;
    context.lineWidth = 1;
    context.setLineDash([2, 3]);
    for (const at of [x + 2, x + width - 2]) {
      context.beginPath();
      context.moveTo(Math.round(at) + 0.5, 6);
      context.lineTo(Math.round(at) + 0.5, HEIGHT - 6);
      context.stroke();
    }
    context.setLineDash([]);
    if (width < CUT_LABEL_WIDTH) return;
    context.save();
    context.translate(x + width / 2, HEIGHT / 2);
    context.rotate(-Math.PI / 2);
    context.fillStyle = palette.css.faint;
    context.font = "10px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText(span(us), 0, 0, HEIGHT - 8);
    context.restore();
  }

  listen() {
    const { canvas } = this;
    canvas.addEventListener("pointermove", (event) => this.point(this.stepAt(event)));
    canvas.addEventListener("pointerleave", () => this.point(null));
    canvas.addEventListener("blur", () => this.point(null));
    canvas.addEventListener("click", (event) => {
      const step = this.stepAt(event);
      if (step) this.onPick(step);
    });
    canvas.addEventListener("keydown", (event) => this.onKey(event));
  }

  onKey(event) {
    const last = this.steps.length - 1;
    if (last < 0) return;
    const id = this.pointedId ?? this.pickedId;
    const at = this.steps.findIndex((step) => step.id === id);
    const targets = { ArrowLeft: at < 0 ? last : Math.max(0, at - 1), ArrowRight: at < 0 ? 0 : Math.min(last, at + 1), Home: 0, End: last };
    if (event.key in targets) this.point(this.steps[targets[event.key]]);
    else if (event.key === "Enter" && at >= 0) this.onPick(this.steps[at]);
    else return;
    event.preventDefault();
  }

  point(step) {
    if ((step?.id ?? null) === this.pointedId) return;
    this.pointedId = step?.id ?? null;
    this.draw();
    this.onPoint(step, step ? this.boxOf(step) : null);
  }

  // The step under the pointer, or the nearest one in reach.
  stepAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    let nearest = null, least = MAX_REACH;
    for (const step of this.steps) {
      const bar = this.boxOf(step);
      const dx = Math.max(bar.x - x, 0, x - bar.x - bar.width), dy = Math.max(bar.y - y, 0, y - bar.y - bar.height);
      if (Math.hypot(dx, dy) < least) [nearest, least] = [step, Math.hypot(dx, dy)];
    }
    return nearest;
  }
}
