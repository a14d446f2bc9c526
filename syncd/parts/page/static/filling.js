// Steps that are being written, with their shards.

import { bar, node, put } from "./dom.js";
import { plain, size } from "./text.js";

export const section = {
  id: "filling",
  title: "Being written",
  place: "top",
  update(element, { status }) {
    put(element, status.filling, () => show(status.filling));
  },
};

function show(rows) {
  if (!rows.length) {
    return [node("p", "quiet", "No step is being written.")];
  }
  return [node("ul", "rows", ...rows.map(fill))];
}

function fill(row) {
  const known = row.expected !== null && row.expected > 0;
  const there = known ? `${row.present} of ${row.expected}` : `${row.present} of an unknown number`;
  return node(
    "li",
    "fill",
    node("strong", "", `step ${row.step}`),
    known ? bar(row.present / row.expected, "", `step ${row.step}`) : null,
    node("span", "number", there),
    node("span", "quiet", [row.bytes ? size(row.bytes) : "", known && row.problem.startsWith(there) ? "" : plain(row.problem)].filter(Boolean).join(" \u00B7 ")),
  );
}

