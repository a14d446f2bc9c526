// Scales of a chart: where its ticks are and how values read. No function here touches the page.

import { clock, size } from "./text.js";

const MINUTE = 60;
const HOUR = 3600;
const DAY = 86400;
const TIMES = [1, 2, 5, 10, 15, 30, MINUTE, 2 * MINUTE, 5 * MINUTE, 10 * MINUTE, 15 * MINUTE, 30 * MINUTE, HOUR, 2 * HOUR, 3 * HOUR, 6 * HOUR, 12 * HOUR, DAY, 2 * DAY, 7 * DAY, 30 * DAY];

// A value with its unit, as its chart has it.
export function valued(value, unit) {
  if (value === null) {
    return "not finite";
  }
  if (unit === "bytes") {
    return `${value < 0 ? "-" : ""}${size(Math.round(Math.abs(value)))}`;
  }
  if (unit === "seconds") {
    return Math.abs(value) < 1 ? `${short(1000 * value)} ms` : `${short(value)} s`;
  }
  return short(value);
}

function short(value) {
  const big = Math.abs(value);
  return big >= 1e6 || (big > 0 && big < 1e-3) ? value.toExponential(1) : `${Number(value.toPrecision(3))}`;
}

// Places of about four ticks between two values, in round numbers of the unit that is shown.
export function ticks(low, high, unit) {
  const factor = unit === "bytes" ? 1024 ** Math.floor(Math.log2(Math.max(high - low, 1)) / 10) : 1;
  const rough = (high - low) / factor / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const whole = unit === "versions" || unit === "explorers";
  const step = factor * Math.max(power * [1, 2, 5, 10].find((nice) => nice * power >= rough * 0.999), whole ? 1 : 0);
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, place) => (first + place) * step);
}

// The lowest and highest value that an axis has, with some air.
export function range(values, fromZero) {
  let low = fromZero ? 0 : Infinity;
  let high = fromZero ? 0 : -Infinity;
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  const air = (high - low || Math.abs(high) || 1) * 0.06;
  return [fromZero && low === 0 ? 0 : low - air, high + air];
}

// Times of ticks at round local times, at most so many.
export function times(begins, ends, most) {
  const step = TIMES.find((each) => (ends - begins) / each <= most) ?? Math.ceil((ends - begins) / most / DAY) * DAY;
  const shift = new Date(begins * 1000).getTimezoneOffset() * MINUTE;
  const found = [];
  for (let at = Math.ceil((begins - shift) / step) * step + shift; at <= ends; at += step) {
    found.push([at, timed(at, step)]);
  }
  return found;
}

function timed(at, step) {
  const date = new Date(at * 1000);
  if (step >= DAY) {
    return date.toLocaleDateString([], { month: "short", day: "numeric" });
  }
  const digits = { hour: "2-digit", minute: "2-digit", hour12: false };
  return date.toLocaleTimeString([], step < MINUTE ? { ...digits, second: "2-digit" } : digits);
}

export function moment([at, step]) {
  return step === null ? clock(at) : `step ${step}, ${clock(at)}`;
}
