// One chart as SVG: lines over time, and a cursor that mouse, finger and arrow keys move.
//
// For screen readers it is a slider, whose value is the text of the place under the cursor.

import { moment, range, ticks, times, valued } from "./axes.js";
import { node } from "./dom.js";
import { plain } from "./text.js";

const HEIGHT = 148;
const EDGE = { top: 8, right: 10, bottom: 22, left: 56 };
const TICK_EVERY = 90;
const DOTS_BELOW = 30;
const SHOWN_BY_TICKS = new Set(["", "seconds", "bytes", "explorers"]);

export function drawn(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) {
    made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// A figure that `update` fills, and whose cursor `point` sets; `moved` is told the time under its own cursor, or null.
export function figure(moved) {
  const drawing = drawn("svg", { class: "chart", tabindex: "0", role: "slider", height: HEIGHT });
  const title = node("h3", "");
  const keys = node("p", "keys");
  const whole = node("figure", "", node("figcaption", "", title, keys), drawing);
  const known = { chart: null, scale: null, places: [], at: -1 };
  const tell = () => tellPlace(known, keys, drawing);
  listen(drawing, known, moved);
  return {
    whole,
    update(chart, domain) {
      known.chart = chart;
      title.textContent = SHOWN_BY_TICKS.has(chart.unit) ? chart.title : `${chart.title} (${chart.unit})`;
      const values = chart.series.flatMap((each) => each.points.map((point) => point[2])).filter((value) => value !== null);
      whole.hidden = !values.length;
      known.places = lead(chart).points;
      if (values.length) {
        known.scale = scales(domain, range(values, chart.from_zero), drawing.getBoundingClientRect().width || 320);
        drawing.setAttribute("aria-label", `${title.textContent} over time`);
        drawing.replaceChildren(...grid(known.scale, chart.unit), ...chart.series.flatMap((each, place) => curve(chart, each, place, known.scale)), drawn("line", { class: "cursor", y1: EDGE.top, y2: HEIGHT - EDGE.bottom }));
      }
      tell();
    },
    point(at) {
      known.at = at === null ? -1 : nearest(known.places, at);
      tell();
    },
  };
}

// The series whose places the cursor visits.
function lead(chart) {
  return chart.series.reduce((most, each) => (each.points.length > most.points.length ? each : most), { points: [] });
}

function scales([begins, ends], [low, high], width) {
  const across = width - EDGE.left - EDGE.right;
  const down = HEIGHT - EDGE.top - EDGE.bottom;
  const x = (at) => EDGE.left + (across * (at - begins)) / Math.max(ends - begins, 1e-9);
  const y = (value) => EDGE.top + (down * (high - value)) / (high - low);
  const at = (left) => begins + ((left - EDGE.left) / across) * (ends - begins);
  return { x, y, at, begins, ends, low, high, width };
}

function grid(scale, unit) {
  const rows = ticks(scale.low, scale.high, unit).map((value) => [
    drawn("line", { class: "grid", x1: EDGE.left, x2: scale.width - EDGE.right, y1: scale.y(value), y2: scale.y(value) }),
    drawn("text", { x: EDGE.left - 6, y: scale.y(value) + 4, "text-anchor": "end" }, valued(value, unit)),
  ]);
  const columns = times(scale.begins, scale.ends, Math.max(Math.floor(scale.width / TICK_EVERY), 1)).map(([at, text]) =>
    drawn("text", { x: Math.min(Math.max(scale.x(at), EDGE.left), scale.width - 24), y: HEIGHT - 6, "text-anchor": "middle" }, text),
  );
  return [...rows.flat(), ...columns];
}

function curve(chart, series, place, scale) {
  if (series.style === "low" || !series.points.length) {
    return [];
  }
  if (series.style === "high") {
    const low = chart.series.find((each) => each.style === "low");
    return [drawn("path", { class: "band", d: band(series.points, low.points, scale) })];
  }
  const style = `curve of-${place}`;
  const dots = series.points.length < DOTS_BELOW && series.style !== "step" ? series.points.filter((point) => point[2] !== null) : [];
  return [
    drawn("path", { class: style, d: path(series.points, scale, series.style === "step") }),
    ...dots.map(([at, , value]) => drawn("circle", { class: `dot of-${place}`, cx: scale.x(at), cy: scale.y(value), r: 2 })),
    ...series.points.filter((point) => point[2] === null).map(([at]) => drawn("path", { class: "odd", d: `M${scale.x(at)} ${HEIGHT - EDGE.bottom}l4 -8h-8z` })),
  ];
}

// A line through all points, broken where a value is not finite.
function path(points, scale, isStep) {
  let text = "";
  let before = null;
  for (const [at, , value] of points) {
    if (value !== null) {
      const x = scale.x(at).toFixed(1);
      text += `${before === null ? "M" : isStep ? `H${x}L` : "L"}${x} ${scale.y(value).toFixed(1)}`;
    }
    before = value;
  }
  return text;
}

function band(high, low, scale) {
  const edge = (points) => points.filter((point) => point[2] !== null).map(([at, , value]) => `${scale.x(at).toFixed(1)} ${scale.y(value).toFixed(1)}`);
  const all = [...edge(high), ...edge(low).reverse()];
  return all.length ? `M${all.join("L")}Z` : "";
}

// The place next to a time; of several at one time the last, which holds from then on.
function nearest(places, at) {
  let best = -1;
  places.forEach((place, number) => {
    if (best < 0 || Math.abs(place[0] - at) <= Math.abs(places[best][0] - at)) {
      best = number;
    }
  });
  return best;
}

function listen(drawing, known, moved) {
  const under = (event) => moved(known.scale.at(event.clientX - drawing.getBoundingClientRect().left));
  drawing.addEventListener("pointermove", under);
  drawing.addEventListener("pointerdown", under);
  drawing.addEventListener("pointerleave", () => moved(null));
  drawing.addEventListener("blur", () => moved(null));
  drawing.addEventListener("keydown", (event) => {
    const last = known.places.length - 1;
    const from = known.at < 0 ? last + 1 : known.at;
    const to = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: last }[event.key];
    if (to !== undefined) {
      event.preventDefault();
      moved(known.places[Math.min(Math.max(to, 0), last)][0]);
    }
  });
}

// Tells the values under the cursor, the newest ones without it.
function tellPlace({ chart, scale, places, at: number }, keys, drawing) {
  const chosen = number >= 0 && number < places.length ? places[number] : places.at(-1);
  if (!chosen) {
    keys.replaceChildren();
    return;
  }
  const told = readings(chart, chosen[0]);
  const time = node("time", "", number < 0 ? `latest: ${moment(chosen)}` : moment(chosen));
  keys.replaceChildren(...told.map(([style, label, value]) => node("span", "", node("span", `key ${style}`), `${label} `, node("b", "", value))), time);
  const text = `${moment(chosen)}: ${told.map(([, label, value]) => `${label} ${value}`).join(", ")}`;
  for (const [name, value] of [["valuetext", text], ["valuenow", places.indexOf(chosen) + 1], ["valuemin", 1], ["valuemax", places.length]]) {
    drawing.setAttribute(`aria-${name}`, value);
  }
  const cursor = drawing.querySelector(".cursor");
  cursor?.toggleAttribute("hidden", number < 0);
  cursor?.setAttribute("x1", scale.x(chosen[0]));
  cursor?.setAttribute("x2", scale.x(chosen[0]));
}

// Style, label and text of each line at a time, and of the band.
function readings(chart, at) {
  const value = (each) => {
    const found = each.points[nearest(each.points, at)];
    return found ? valued(found[2], chart.unit) : null;
  };
  const lines = chart.series.map((each, place) => (each.style === "low" || each.style === "high" ? null : [`of-${place}`, plain(each.label), value(each)]));
  const [low, high] = ["low", "high"].map((style) => chart.series.find((each) => each.style === style));
  const area = low && high && value(low) ? [["band", "range", `${value(low)} to ${value(high)}`]] : [];
  return [...lines.filter((line) => line !== null && line[2] !== null), ...area];
}
