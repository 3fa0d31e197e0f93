// The colours of style.css, for canvases; read anew when the scheme changes.

// By number of BlockState; 0 is never sent.
export const BLOCK_STATES = ["unknown", "free", "cached", "used", "shared"];

const STEP_KINDS = ["prefill", "decode", "mixed", "other"];
const OTHERS = ["ink", "faint", "line", "surface"];

export const palette = { css: {}, pixels: new Uint32Array(BLOCK_STATES.length), inkPixel: 0 };

// Read the colours, now and whenever the scheme changes; call `onChange` after the latter.
export function watchPalette(onChange) {
  readPalette();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    readPalette();
    onChange();
  });
}

function readPalette() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  for (const name of [...STEP_KINDS, ...OTHERS]) palette.css[name] = colour(name);
  BLOCK_STATES.forEach((name, state) => {
    if (state) palette.pixels[state] = pixel(colour(`block-${name}`));
  });
  palette.inkPixel = pixel(palette.css.ink);
}

// A colour #rrggbb as the canvas has it in memory: the bytes red, green, blue, alpha.
function pixel(colour) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return new Uint32Array(new Uint8ClampedArray([red, green, blue, 255]).buffer)[0];
}
