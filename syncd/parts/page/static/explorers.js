// Each explorer: whether it lives, what it runs, how far it is behind, and the state of its engine.

import { ago, bar, chip, FOLD, heart, more, node, put, table, unfold } from "./dom.js";
import { count, pair, plain, size, where } from "./text.js";

export const section = {
  id: "explorers",
  title: "Explorers",
  place: "left",
  update(element, { status, left_out: left }) {
    put(element, status.explorers, () => show(status.explorers, left.explorers, status.at));
  },
};

function show(rows, left, now) {
  if (!rows.length) {
    return [node("p", "quiet", "No explorer has joined yet.")];
  }
  const worst = Math.max(1, ...rows.map((row) => row.lag ?? 0));
  // Where not all are seen at first, those that need to be seen come first.
  const ordered = rows.length > FOLD ? [...rows].sort((a, b) => need(b) - need(a)) : rows;
  const engines = rows.some((row) => row.engine);
  const columns = ["explorer", "heartbeat", ...(engines ? ["engine"] : []), "runs", "behind", "reads"];
  const shown = table(columns, ordered.map((row) => explorer(row, worst, engines ? [engine(row, now)] : [])));
  return [shown, unfold(rows.length), more(left, "explorers")];
}

function need(row) {
  const trouble = { bad: 2e9, wait: 1e9 }[ENGINES[row.engine?.state]] ?? 0;
  return row.heart === "dead" ? Infinity : row.heart === "left" ? -1 : trouble + (row.lag ?? 0);
}

export const ENGINES = {
  proven: "ok",
  loaded: "ok",
  refused: "wait",
  failed: "wait",
  unreachable: "bad",
  wrong: "bad",
  dead: "bad",
  stopped: "off",
};

// The state of an explorer's engine, since when, and its figures; nothing of one that reports none.
function engine(row, now) {
  const found = row.engine;
  if (!found) {
    return "";
  }
  if (isGone(row)) {
    return node("span", "heart off", found.state === "stopped" ? "stopped" : `was ${plain(found.state)}`);
  }
  const { state, since, ready, load_seconds: seconds, failures, proof, exam } = found;
  const style = ENGINES[state] ?? "";
  const figures = [
    seconds === null ? "" : `loaded in ${seconds.toPrecision(3)} s`,
    failures ? `${count(failures, "failed load", "failed loads")}` : "",
    proof ? `difference ${proof.mean.toPrecision(2)} of ${proof.tolerance.toPrecision(2)}` : "",
    proof && proof.seen ? `changes of ${Math.round(100 * proof.seen)} % of the model or more would be seen` : "",
    exam === "passed" || exam === "failed" ? `exam ${exam}` : "",
  ].filter(Boolean);
  return node(
    "span",
    "",
    node("span", `heart ${style}`, ago(Math.max(0, now - since), `${plain(state)} `, "")),
    ready || style === "bad" || style === "off" ? "" : node("span", "quiet", " not ready"),
    figures.length ? node("span", "quiet figures", ` ${figures.join(" \u00B7 ")}`) : "",
  );
}

function isGone({ heart: known }) {
  return known === "dead" || known === "left";
}

function explorer(row, worst, engines) {
  const runs = [row.applied ? pair(row.applied) : "nothing yet"];
  if (row.loading) {
    runs.push(" ", chip(`loading ${pair(row.loading)}`, "accent"));
  }
  const gone = isGone(row);
  const name = node("span", "", node("strong", "", plain(row.id)), " ", node("span", "quiet", where(row)));
  const lag = row.lag === null ? "" : row.lag ? node("span", "lag", `${row.lag}`, bar(row.lag / worst, row.lag > 1 ? "wait" : "", "behind")) : "0";
  if (row.read) {
    const shown = `read ${size(row.read.origin)}, ${size(row.read.peers)} of peers`;
    runs.push(" ", node("span", row.read.over_budget ? "bad" : "quiet", shown));
  }
  const status = row.status === "require_sync" ? chip("waits for a version", "accent") : "";
  return [gone ? "faint" : "", [name, heart(row), ...engines, node("span", "", ...runs, " ", status), lag, row.leases.join(", ")]];
}

