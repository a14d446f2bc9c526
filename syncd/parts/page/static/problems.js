// What is wrong, each kind once, the most urgent first (docs/json.md, `problem_groups`).

import { command, node, put } from "./dom.js";
import { plain } from "./text.js";

const STYLES = { critical: "bad", warning: "wait", notice: "" };
const MOST_DETAILS = 50;
const opened = new Set();

export const section = {
  id: "problems",
  title: "",
  label: "Problems",
  place: "top",
  update(element, { status }) {
    put(element, status.problem_groups, () => status.problem_groups.map(show));
  },
};

function show(group) {
  const { severity, text, details, hint, help } = group;
  const head = [node("strong", "severity", severity), " ", plain(text)];
  const body = details.length > 1 ? unfolding(group, head) : node("p", "", ...head);
  return node("div", `notice ${STYLES[severity]}`, body, hint ? command(hint) : "", entry(help));
}

// The entry of Troubleshooting; it is a page elsewhere, which must not learn where this one is.
function entry(address) {
  const link = node("a", "help", "what to do");
  link.href = address;
  link.rel = "noreferrer";
  link.target = "_blank";
  return node("p", "", link);
}

// Stays open or closed as the reader left it when the problems change.
function unfolding({ name, details, count }, head) {
  const rows = details.slice(0, MOST_DETAILS).map((detail) => node("li", "", plain(detail)));
  const rest = count - rows.length;
  const made = node("details", "", node("summary", "", ...head), node("ul", "", ...rows, rest > 0 ? node("li", "", `and ${rest} more`) : ""));
  made.open = opened.has(name);
  made.addEventListener("toggle", () => (made.open ? opened.add(name) : opened.delete(name)));
  return made;
}
