// Rolling updates: which version is tested, who loads now, who waits and why. Hidden where versions are not rolled out.

import { ago, bar, chip, more, node, put, table } from "./dom.js";
import { pair, plain } from "./text.js";

const MOST = 12;

export const section = {
  id: "rolling",
  title: "Rolling update",
  place: "left",
  update(element, { status }) {
    element.parentElement.hidden = !status.rolling;
    if (status.rolling) {
      put(element, [status.rolling, status.explorers], () => show(status.rolling, status.explorers));
    }
  },
};

const STYLES = { idle: "ok", canary: "wait", rolling: "accent", stopped: "bad" };

function show(wave, explorers) {
  const named = (version) => (version ? pair(version) : "none");
  const word = wave.by_word ? " by the word of canaries" : "";
  const head = node("p", "", chip(wave.phase, STYLES[wave.phase] ?? ""), ` candidate ${named(wave.candidate)} \u00B7 approved ${named(wave.approved)}${word}`);
  return [head, ...versions(explorers), ...slots(wave), ...waiting(wave), ...old(wave)];
}

// How many of the engines run each version.
function versions(explorers) {
  const living = explorers.filter(({ heart }) => heart !== "dead" && heart !== "left");
  const counts = new Map();
  for (const { applied } of living) {
    const name = applied ? pair(applied) : "nothing yet";
    counts.set(name, (counts.get(name) ?? 0) + 1);
  }
  const row = ([name, number]) => node("li", "fill", node("strong", "", name), bar(number / living.length, "", name), node("span", "number", `${number} of ${living.length}`));
  return counts.size ? [node("ul", "rows", ...[...counts].sort().map(row))] : [];
}

function slots({ slots: taken, limit, unit }) {
  if (!taken.length) {
    return [];
  }
  const row = ({ explorer, age, loads, free, ...version }) => {
    const doing = [loads ? "loads" : "may load", free ? "serves nothing" : ""].filter(Boolean).join(", ");
    return ["", [plain(explorer), pair(version), ago(age, "", ""), doing]];
  };
  const units = unit === "host" ? "hosts" : "engines";
  return [table([`slot (${limit} ${units} at once)`, "version", "for", ""], taken.slice(0, MOST).map(row)), more(Math.max(taken.length - MOST, 0), "slots")];
}

function waiting({ waiting: names, why }) {
  return names.length ? [node("p", "quiet", `Next: ${names.slice(0, MOST).map(plain).join(", ")}. ${plain(why)}.`)] : [];
}

function old({ old: names }) {
  return names.length ? [node("p", "quiet", `These do not wait for their turn: ${names.slice(0, MOST).map(plain).join(", ")}.`)] : [];
}
