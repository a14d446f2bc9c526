// Charts over time, from charts.json: asked for beside data.json, and less often.

import { figure } from "./chart.js";
import { node, put } from "./dom.js";
import { request } from "./feed.js";
import { clock, count, plain, size } from "./text.js";

const SCHEMA = 1;
const EVERY = 10000;
const SOON = 1000;

export const section = {
  id: "charts",
  title: "Over time",
  place: "below",
  update(element) {
    const now = performance.now();
    if (now >= state.next) {
      state.next = now + EVERY;
      ask(element);
    }
  },
};

const state = { next: 0, figures: new Map(), shown: null };

async function ask(element) {
  try {
    const answer = await request("charts.json");
    const found = answer.ok ? await answer.json() : null;
    if (found?.schema_version === SCHEMA) {
      show(element, found);
    }
  } catch {
    // data.json of the same server is asked for too, and the page says that nobody answers
  }
}

function show(element, found) {
  if (!element.firstChild) {
    element.append(node("div", "charts"), node("div", "quiet"));
    new ResizeObserver(() => state.shown && fill(state.shown)).observe(element);
  }
  const [charts, notes] = element.children;
  for (const chart of found.charts) {
    if (!state.figures.has(chart.name)) {
      state.figures.set(chart.name, figure(point));
      charts.append(state.figures.get(chart.name).whole);
    }
  }
  state.shown = found;
  fill(found);
  put(notes, told(found), () => told(found).map((text) => node("p", "", text)));
  if (found.serving.state === "starting" || found.files.some((file) => isUnread(file))) {
    state.next = performance.now() + SOON;
  }
}

function fill({ charts }) {
  const all = charts.flatMap((chart) => chart.series.flatMap((each) => each.points.map((point) => point[0])));
  const domain = all.reduce(([begins, ends], at) => [Math.min(begins, at), Math.max(ends, at)], [Infinity, -Infinity]);
  for (const chart of charts) {
    state.figures.get(chart.name).update(chart, domain);
  }
}

function point(at) {
  for (const each of state.figures.values()) {
    each.point(at);
  }
}

// The last line of a file may not be ended yet.
function isUnread(file) {
  return file.bytes - file.read > 1 << 20;
}

function told({ charts, files, serving }) {
  const found = [];
  if (serving.state === "stuck" || serving.state === "failing") {
    found.push(`The charts show ${serving.at ? clock(serving.at) : "no reading yet"}: ${serving.error ? plain(serving.error.message) : "the files do not answer"}.`);
  }
  for (const file of files) {
    if (isUnread(file)) {
      found.push(`${plain(file.name)}: ${size(file.read)} of ${size(file.bytes)} read so far.`);
    }
    if (file.ignored) {
      found.push(`${plain(file.name)}: ${count(file.ignored, "line", "lines")} could not be read.`);
    }
  }
  for (const { title, left_out: more } of charts.filter((chart) => chart.left_out)) {
    found.push(`${title}: ${count(more, "figure", "figures")} more in metrics.jsonl.`);
  }
  const missing = charts.filter((chart) => chart.missing && chart.series.every((each) => !each.points.length));
  for (const why of new Set(missing.map((chart) => chart.missing))) {
    found.push(`${why}: ${missing.filter((chart) => chart.missing === why).map((chart) => chart.title).join(", ")}.`);
  }
  const thinned = Math.max(...charts.flatMap((chart) => chart.series.map((each) => each.per_group)), 1);
  if (thinned > 1) {
    found.push(`Of up to ${thinned} values in a row the lowest and the highest are shown.`);
  }
  return found;
}
