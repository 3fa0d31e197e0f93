// Numbers and times in words.

const COUNT = new Intl.NumberFormat("en");
const ONE_DIGIT = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

export function count(value) {
  return COUNT.format(value);
}

// "1 block", "2 blocks".
export function counted(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

// A rate: one digit behind the point while it is small.
export function rate(value) {
  return value < 100 ? ONE_DIGIT.format(value) : count(Math.round(value));
}

export function share(part, whole) {
  return whole ? `${ONE_DIGIT.format((100 * part) / whole)} %` : "–";
}

// A span of time in microseconds: "850 µs", "12.4 ms", "3.2 s", "4 min 5 s", "2 h 10 min", "3 d 4 h".
export function span(us) {
  if (us < 1000) return `${Math.round(us)} µs`;
  if (us < 100_000) return `${ONE_DIGIT.format(us / 1000)} ms`;
  if (us < 999_500) return `${Math.round(us / 1000)} ms`;
  const seconds = us / 1e6;
  if (seconds < 60) return `${ONE_DIGIT.format(seconds)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return pair(whole, 60, "min", "s");
  if (whole < 86_400) return pair(Math.floor(whole / 60), 60, "h", "min");
  return pair(Math.floor(whole / 3600), 24, "d", "h");
}

// The same of milliseconds; seconds and up are what people read.
export function spanMs(ms) {
  return span(ms * 1000);
}

// Bytes: "812 B", "1.5 KiB".
export function size(numBytes) {
  return numBytes < 1024 ? `${numBytes} B` : `${ONE_DIGIT.format(numBytes / 1024)} KiB`;
}

// A text that begins small, as a sentence: with a capital, and a full stop.
export function sentence(text) {
  return text && text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}

function pair(value, base, large, small) {
  const rest = value % base;
  return `${Math.floor(value / base)} ${large}${rest ? ` ${rest} ${small}` : ""}`;
}
