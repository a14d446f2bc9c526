// A lane for each explorer: which version it ran when, and how sure that is; from lanes.json.

import { times } from "./axes.js";
import { drawn } from "./chart.js";
import { more, node, put } from "./dom.js";
import { ENGINES } from "./explorers.js";
import { request } from "./feed.js";
import { clock, lasting, plain } from "./text.js";

const SCHEMA = 1;
const EVERY = 10000;
const HEIGHT = 22;
const COLOURS = 6;
const ROOM = 7;

export const section = {
  id: "lanes",
  title: "Versions by explorer",
  place: "below",
  update(element) {
    if (performance.now() >= state.next) {
      state.next = performance.now() + EVERY;
      ask(element);
    }
  },
};

const state = { next: 0, found: null, text: "", width: 0 };

async function ask(element) {
  try {
    const answer = await request("lanes.json");
    const found = answer.ok ? await answer.json() : null;
    if (found?.schema_version === SCHEMA) {
      if (!state.found) {
        new ResizeObserver(() => show(element)).observe(element);
      }
      state.found = found;
      show(element);
    }
  } catch {
    // data.json of the same server is asked for too, and the page says that nobody answers
  }
}

// Built anew only if something has changed, so that a reader's place is kept.
function show(element) {
  const { lanes, left_out: left, quarantined, until } = state.found;
  put(element, [lanes, left, quarantined, until, element.clientWidth], () => (lanes.length ? all(lanes, left, quarantined, until, element.clientWidth) : [node("p", "quiet", "The daemon's journal does not have a version of an explorer yet.")]), new Set());
}

function all(lanes, left, quarantined, until, whole) {
  const begins = Math.min(...lanes.map((lane) => lane.spans[0][0]));
  const narrow = whole < 640;
  const width = Math.max(narrow ? whole - 32 : whole - 192, 80);
  const x = (at) => (width * (at - begins)) / Math.max(until - begins, 1e-9);
  const versions = new Map(ordered(lanes).map((name, place) => [name, place % COLOURS]));
  const told = node("p", "told quiet", HINT);
  told.setAttribute("role", "status");
  const known = { x, width, until, versions, told, quarantined: new Set(quarantined) };
  return [
    node("ul", "rows lanes", ...lanes.map((lane) => node("li", "", node("span", "name", plain(lane.explorer)), row(lane, known))), node("li", "axis", node("span", "", ""), axis(begins, known))),
    told,
    node("p", "legend", ...LEGEND.map(([style, text]) => node("span", `lane-key ${style}`, text))),
    node("p", "quiet", `From the daemon's journal, since ${clock(begins)}. While no daemon ran, a lane shows what was known before.`),
    more(left, "explorers"),
  ];
}

const HINT = "Point at a lane, or use the arrow keys in it, for version, state and time.";
const LEGEND = [
  ["proven", "proven"],
  ["reported", "reported, not proven"],
  ["trouble", "engine in trouble"],
  ["aside", "quarantined version"],
];

function ordered(lanes) {
  const found = new Map();
  for (const [, , generation, step] of lanes.flatMap((lane) => lane.spans)) {
    if (step !== null) {
      found.set(`${generation}.${step}`, [generation, step]);
    }
  }
  return [...found].sort(([, a], [, b]) => a[0] - b[0] || a[1] - b[1]).map(([name]) => name);
}

function label([, , generation, step]) {
  return step === null ? "no version" : `${generation}.${step}`;
}

function sure(span, known) {
  const style = ENGINES[span[4]];
  if (style === "bad" || style === "wait") {
    return "trouble";
  }
  return known.quarantined.has(span[3]) ? "aside" : span[4] === "proven" ? "proven" : "reported";
}

function row(lane, known) {
  const drawing = drawn("svg", { class: "lane", width: known.width, height: HEIGHT, tabindex: "0", role: "slider", "aria-label": `Versions of ${plain(lane.explorer)}` });
  for (const span of lane.spans) {
    const left = known.x(span[0]);
    const wide = Math.max(known.x(span[1] ?? known.until) - left, 1.5);
    const colour = span[3] === null ? "none" : `v${known.versions.get(label(span))}`;
    drawing.append(drawn("rect", { class: `${colour} ${sure(span, known)}`, x: left + 0.5, y: 2.5, width: Math.max(wide - 1, 0.5), height: HEIGHT - 5, rx: 2 }));
    if (wide > ROOM * label(span).length + 6) {
      drawing.append(drawn("text", { x: left + 5, y: 15 }, label(span)));
    }
  }
  if (lane.gone) {
    drawing.append(end(lane, known));
  }
  listen(drawing, lane, known);
  return drawing;
}

// A cross where an explorer died or went away, and the word if there is room.
function end(lane, known) {
  const at = Math.min(known.x(lane.spans.at(-1)[1]), known.width - 10);
  const made = drawn("g", { class: `gone ${lane.gone}` }, drawn("path", { d: `M${at + 2} 7l8 8m0 -8l-8 8` }));
  if (known.width - at > 60) {
    made.append(drawn("text", { x: at + 14, y: 15 }, lane.gone));
  }
  return made;
}

function axis(begins, { x, width, until }) {
  const made = drawn("svg", { class: "lane", width, height: 16, "aria-hidden": "true" });
  for (const [at, text] of times(begins, until, Math.max(Math.floor(width / 90), 1))) {
    made.append(drawn("text", { x: Math.min(Math.max(x(at), 16), width - 18), y: 12, "text-anchor": "middle" }, text));
  }
  return made;
}

function listen(drawing, lane, known) {
  let at = lane.spans.length - 1;
  const choose = (place, isTold = true) => {
    at = Math.min(Math.max(place, 0), lane.spans.length - 1);
    const text = words(lane, at, known);
    for (const [name, value] of [["valuetext", text], ["valuenow", at + 1], ["valuemin", 1], ["valuemax", lane.spans.length]]) {
      drawing.setAttribute(`aria-${name}`, value);
    }
    if (isTold) {
      known.told.textContent = `${plain(lane.explorer)}: ${text}`;
    }
  };
  choose(at, false);
  const rects = [...drawing.querySelectorAll("rect")];
  drawing.addEventListener("pointerover", (event) => rects.includes(event.target) && choose(rects.indexOf(event.target)));
  drawing.addEventListener("focus", () => choose(at));
  drawing.addEventListener("keydown", (event) => {
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: lane.spans.length - 1 }[event.key];
    if (to !== undefined) {
      event.preventDefault();
      choose(to);
    }
  });
}

function words(lane, place, known) {
  const span = lane.spans[place];
  const [since, until, , step, how] = span;
  const isLast = place === lane.spans.length - 1;
  const end = until === null ? "until now" : `to ${clock(until)}${isLast && lane.gone ? `, then ${lane.gone}` : ""}`;
  return [label(span), how === null ? "reported" : plain(how), step !== null && known.quarantined.has(step) ? "quarantined" : "", `${clock(since)} ${end} (${lasting((until ?? known.until) - since)})`].filter(Boolean).join(", ");
}
