// Recent decisions of the daemon.

import { node, put } from "./dom.js";
import { clock, count, plain, sentence } from "./text.js";

export const section = {
  id: "events",
  title: "What the daemon decided",
  place: "side",
  update(element, { events }) {
    put(element, events.map((event) => [event.at, event]), () => show(events));
  },
};

function show(rows) {
  if (!rows.length) {
    return [node("p", "quiet", "The daemon's journal is empty, or does not exist.")];
  }
  return [node("ol", "rows events", ...rows.map(event))];
}

function event(row) {
  const time = node("time", "quiet number", typeof row.at === "number" ? clock(row.at) : "");
  const style = { warning: "wait", error: "bad" }[row.level] ?? "";
  return node("li", style, time, node("span", "", row.run ? several(row) : sentence(row)));
}


const COMINGS = { explorer_joined: "joined", explorer_left: "left", explorer_died: "died" };

// Events of one kind in a row.
function several({ event: name, at, generation, step, run }) {
  const from = typeof run.since === "number" && at - run.since >= 1 ? ` since ${clock(run.since)}` : "";
  if (Object.hasOwn(COMINGS, name)) {
    return `${run.count} explorers ${COMINGS[name]}${from}`;
  }
  const gone = run.removed ? `, ${count(run.removed, "step", "steps")} removed` : "";
  return plain(`${run.first} to ${generation}.${step}: ${run.count} versions published${gone}${from}`);
}
