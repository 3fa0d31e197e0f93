// A canvas with a cell for each block of a pool. Only cells that changed are painted, with one putImageData.

import { palette, BLOCK_STATES } from "./palette.js";

const MAX_CELL_CSS = 15;
const MIN_CELL = 2; // device pixels
const MIN_CELL_WITH_GAP = 4;
const HIGHLIGHT = BLOCK_STATES.length; // added to the state of a highlighted block
const MIN_CELL_WITH_FRAME = 6; // smaller ones are filled with ink when they are highlighted

// The largest cells, in device pixels, with which a map of this width is at most so high, unless they would be too small.
function cellSize(numBlocks, width, height, ratio) {
  for (let size = Math.floor(MAX_CELL_CSS * ratio); size > MIN_CELL; size--) {
    const columns = Math.floor(width / size);
    if (columns && Math.ceil(numBlocks / columns) * size <= height) return size;
  }
  return MIN_CELL;
}

// Give the pixels of a square a colour; `start` is its first one, rows are `width` apart.
function fillSquare(pixels, width, start, size, colour) {
  for (let y = 0; y < size; y++) {
    const row = start + y * width;
    for (let x = 0; x < size; x++) pixels[row + x] = colour;
  }
}

export class BlockMap {
  // `onPoint(block)` tells which block the pointer or the keyboard is at, null when it leaves; `onPick(block)` a choice.
  constructor(canvas, onPoint, onPick) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.states = new Uint8Array();
    this.highlighted = new Set();
    this.cursor = null;
    this.painted = new Uint8Array(); // what is on the canvas: the state, plus HIGHLIGHT
    this.onPoint = onPoint;
    this.onPick = onPick;
    this.size = 0;
    this.maxHeight = 0; // CSS pixels, of the whole map while cells can be smaller
    new ResizeObserver(() => this.layOut()).observe(canvas.parentElement);
    this.listen();
  }

  // Show these states, a byte each, and blocks that are highlighted.
  show(states, highlighted) {
    const isNewPool = states.length !== this.states.length;
    this.states = states;
    this.highlighted = highlighted;
    if (isNewPool) this.layOut();
    else this.paint();
  }

  setMaxHeight(maxHeight) {
    if (maxHeight === this.maxHeight) return;
    this.maxHeight = maxHeight;
    this.layOut();
  }

  // Paint all cells anew, such as after a change of colours.
  repaint() {
    this.painted.fill(0);
    this.paint();
  }

  // Where a block is, in CSS pixels of the canvas: { x, y, size }.
  cellOf(block) {
    const size = this.size / this.ratio;
    return { x: (block % this.columns) * size, y: Math.floor(block / this.columns) * size, size };
  }

  layOut() {
    const ratio = devicePixelRatio || 1;
    const width = Math.floor(this.canvas.parentElement.clientWidth * ratio);
    if (!width || !this.states.length) return;
    this.ratio = ratio;
    this.size = cellSize(this.states.length, width, this.maxHeight * ratio, ratio);
    this.columns = Math.max(1, Math.floor(width / this.size));
    const rows = Math.ceil(this.states.length / this.columns);
    const { canvas } = this;
    canvas.width = this.columns * this.size;
    canvas.height = rows * this.size;
    canvas.style.width = `${canvas.width / ratio}px`;
    canvas.style.height = `${canvas.height / ratio}px`;
    Object.assign(canvas.dataset, { columns: this.columns, cell: this.size }); // for tools that read the picture
    this.image = this.context.createImageData(canvas.width, canvas.height);
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.painted = new Uint8Array(this.states.length);
    this.paint();
  }

  paint() {
    if (!this.size) return;
    const { states, painted } = this;
    const wantedStates = states.slice();
    for (const block of this.highlighted) if (block < states.length) wantedStates[block] += HIGHLIGHT;
    let first = -1, last = -1;
    for (let block = 0; block < states.length; block++) {
      if (painted[block] === wantedStates[block]) continue;
      painted[block] = wantedStates[block];
      this.paintCell(block);
      if (first < 0) first = block;
      last = block;
    }
    if (first < 0) return;
    const top = Math.floor(first / this.columns) * this.size;
    const bottom = (Math.floor(last / this.columns) + 1) * this.size;
    this.context.putImageData(this.image, 0, 0, 0, top, this.canvas.width, bottom - top);
  }

  paintCell(block) {
    const { pixels, size, columns } = this;
    const width = columns * size;
    const isHighlighted = this.painted[block] >= HIGHLIGHT;
    const colour = palette.pixels[this.states[block]];
    const inner = size - (size >= MIN_CELL_WITH_GAP ? 1 : 0);
    const start = Math.floor(block / columns) * size * width + (block % columns) * size;
    fillSquare(pixels, width, start, inner, isHighlighted ? palette.inkPixel : colour);
    if (!isHighlighted || size < MIN_CELL_WITH_FRAME) return;
    const frame = size >= 2 * MIN_CELL_WITH_FRAME ? 2 : 1;
    fillSquare(pixels, width, start + frame * (width + 1), inner - 2 * frame, colour);
  }

  listen() {
    const { canvas } = this;
    canvas.addEventListener("pointermove", (event) => this.moveTo(this.blockAt(event)));
    canvas.addEventListener("pointerleave", () => this.moveTo(null));
    canvas.addEventListener("blur", () => this.moveTo(null));
    canvas.addEventListener("click", (event) => {
      const block = this.blockAt(event);
      if (block !== null) this.onPick(block);
    });
    canvas.addEventListener("keydown", (event) => this.onKey(event));
  }

  onKey(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns };
    const last = this.states.length - 1;
    if (event.key in moves) {
      const next = this.cursor === null ? 0 : this.cursor + moves[event.key];
      this.moveTo(Math.min(Math.max(next, 0), last));
    } else if (event.key === "Home") this.moveTo(0);
    else if (event.key === "End") this.moveTo(last);
    else if (event.key === "Enter" && this.cursor !== null) this.onPick(this.cursor);
    else return;
    event.preventDefault();
  }

  moveTo(block) {
    if (block === this.cursor) return;
    this.cursor = block;
    this.onPoint(block);
  }

  blockAt(event) {
    if (!this.size) return null;
    const box = this.canvas.getBoundingClientRect();
    const size = this.size / this.ratio;
    const column = Math.floor((event.clientX - box.left) / size), row = Math.floor((event.clientY - box.top) / size);
    const block = row * this.columns + column;
    return column >= 0 && column < this.columns && block >= 0 && block < this.states.length ? block : null;
  }
}
