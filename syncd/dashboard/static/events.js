// Recent decisions of the daemon.

import { node, put } from "./dom.js";
import { clock, sentence } from "./text.js";

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
    return [node("p", "quiet", "The daemon's journal is empty, or not there.")];
  }
  return [node("ol", "rows events", ...rows.map(event))];
}

function event(row) {
  const time = node("time", "quiet number", typeof row.at === "number" ? clock(row.at) : "");
  const style = { warning: "wait", error: "bad" }[row.level] ?? "";
  return node("li", style, time, node("span", "", sentence(row)));
}

