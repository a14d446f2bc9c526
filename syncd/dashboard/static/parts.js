// The pieces of the page. Everything becomes text nodes: nothing that a job directory holds is ever markup.

import { reason } from "./rules.js";
import { clock, count, lasting, pair, plain, sentence, size, where } from "./text.js";

const FOLD = 12;

export function node(tag, style, ...children) {
  const made = document.createElement(tag);
  if (style) {
    made.className = style;
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

// Text that tells how long ago something was, and goes on telling it.
export function ago(seconds, before = "", after = " ago") {
  const made = node("span", "ago");
  made.since = performance.now() - seconds * 1000;
  made.words = [before, after];
  tell(made);
  return made;
}

function tell(made) {
  const [before, after] = made.words;
  const text = `${before}${lasting((performance.now() - made.since) / 1000)}${after}`;
  if (made.textContent !== text) {
    made.textContent = text;
  }
}

export function tick() {
  document.querySelectorAll(".ago").forEach(tell);
}

function bar(share, style, label) {
  const made = document.createElement("progress");
  made.max = 1;
  made.value = Math.min(Math.max(share, 0), 1);
  made.className = style;
  made.setAttribute("aria-label", label);
  return made;
}

function chip(text, style = "") {
  return node("span", `chip ${style}`, text);
}

const HEARTS = { alive: "ok", dead: "bad", left: "off", unknown: "wait" };

function heart(module) {
  const style = HEARTS[module.heart] ?? "wait";
  const text = module.heart === "unknown" ? ago(module.beat_age, "heartbeat ~ ") : module.heart;
  return node("span", `heart ${style}`, text);
}

function tile(title, big, style, ...lines) {
  return node("article", `tile ${style}`, node("h2", "", title), node("p", "big", big), ...lines.map((line) => node("p", "quiet", line)));
}

export function tiles({ status, ls }) {
  return [version(status), trainer(status), explorersTile(status), disk(status, ls), daemon(status)];
}

function version({ version: now, newest_complete: newest, marker }) {
  if (!now) {
    return tile("Version", "none yet", "wait", newest === null ? "no step is complete" : `step ${newest} is complete`, plain(marker.problem));
  }
  const lines = [ago(now.age, "published ")];
  if (now.held) {
    lines.push(chip("held after a rollback", "wait"));
  }
  if (now.previous) {
    lines.push(`${pair(now.previous)} before it`);
  }
  const made = tile("Version", pair(now), now.held ? "wait" : "", ...lines);
  made.title = plain(now.path);
  return made;
}

function trainer({ trainers, version: now }) {
  const living = trainers.filter((item) => item.alive !== false);
  const [first] = living.length ? living : trainers;
  if (!first) {
    return tile("Trainer", "none", "off", "none has ever shown itself");
  }
  const ahead = now && first.step !== null ? first.step - now.step : 0;
  const others = trainers.length - 1;
  return tile(
    "Trainer",
    first.step === null ? first.status : `step ${first.step}`,
    first.heart === "dead" ? "bad" : "",
    heart(first),
    ahead > 0 ? `${count(ahead, "step", "steps")} ahead of the version` : "",
    where(first),
    others ? `and ${count(others, "other", "others")}` : "",
  );
}

function explorersTile({ explorers }) {
  const living = explorers.filter((item) => item.alive !== false);
  const dead = explorers.filter((item) => item.heart === "dead").length;
  const lag = Math.max(0, ...living.map((item) => item.lag ?? 0));
  const loading = living.filter((item) => item.loading).length;
  const idle = living.filter((item) => item.engine && !item.engine.ready).length;
  const useless = living.some((item) => ENGINES[item.engine?.state] === "bad");
  const follow = lag ? `at most ${count(lag, "step", "steps")} behind` : "all at the version";
  return tile(
    "Explorers",
    living.length ? `${living.length}` : "none",
    dead || useless ? "bad" : "",
    living.length ? follow : "nobody follows",
    loading ? `${loading} loading now` : "",
    idle ? `${count(idle, "engine", "engines")} not ready` : "",
    dead ? `${dead} dead` : "",
  );
}

function disk({ disk: found, steps }, ls) {
  const budget = ls.policy.max_bytes;
  const lines = [];
  let style = "";
  if (found.free !== null) {
    const share = found.job_bytes / Math.max(found.job_bytes + found.free, 1);
    const mean = found.job_bytes / Math.max(steps.total, 1);
    style = found.free < mean ? "bad" : found.free < 3 * mean ? "wait" : "";
    lines.push(bar(share, style, "the job's share of what is left"), `${size(found.free)} free on ${plain(found.type)}`);
  }
  if (budget) {
    lines.push(`budget ${size(budget)}`);
  }
  return tile("Disk", size(found.job_bytes), style, ...lines, `in ${count(steps.total, "step", "steps")}`);
}

function daemon({ daemon: found }) {
  if (!found) {
    return tile("Daemon", "none", "wait", "none has ever led this job");
  }
  const words = { alive: "leads", dead: "dead", left: "has left", unknown: "not seen yet" };
  const style = { alive: "", dead: "bad", left: "wait", unknown: "wait" }[found.heart];
  return tile("Daemon", words[found.heart] ?? found.heart, style, where(found), `term ${found.term}`);
}

export function filling(rows) {
  if (!rows.length) {
    return [node("p", "quiet", "No step is being written.")];
  }
  return [node("ul", "rows", ...rows.map(fill))];
}

function fill(row) {
  const known = row.expected !== null && row.expected > 0;
  const there = known ? `${row.present} of ${row.expected}` : `${row.present}, of how many is not known yet`;
  return node(
    "li",
    "fill",
    node("strong", "", `step ${row.step}`),
    known ? bar(row.present / row.expected, "", `step ${row.step}`) : null,
    node("span", "number", there),
    node("span", "quiet", [row.bytes ? size(row.bytes) : "", known && row.problem.startsWith(there) ? "" : plain(row.problem)].filter(Boolean).join(" \u00B7 ")),
  );
}

export function explorers(rows, left, now) {
  if (!rows.length) {
    return [node("p", "quiet", "No explorer has shown itself.")];
  }
  const worst = Math.max(1, ...rows.map((row) => row.lag ?? 0));
  // Where not all are seen at first, those that need to be seen come first.
  const ordered = rows.length > FOLD ? [...rows].sort((a, b) => need(b) - need(a)) : rows;
  const engines = rows.some((row) => row.engine);
  const columns = ["explorer", "heartbeat", ...(engines ? ["engine"] : []), "runs", "behind", "reads", "host"];
  const shown = table(columns, ordered.map((row) => explorer(row, worst, engines ? [engine(row, now)] : [])));
  return [shown, unfold(rows.length), more(left, "explorers")];
}

function need(row) {
  const trouble = { bad: 2e9, wait: 1e9 }[ENGINES[row.engine?.state]] ?? 0;
  return row.heart === "dead" ? Infinity : row.heart === "left" ? -1 : trouble + (row.lag ?? 0);
}

const ENGINES = {
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
function engine({ engine: found }, now) {
  if (!found) {
    return "";
  }
  const { state, since, ready, load_seconds: seconds, failures, proof } = found;
  const style = ENGINES[state] ?? "";
  const figures = [
    seconds === null ? "" : `loaded in ${seconds.toPrecision(3)} s`,
    failures ? `${count(failures, "failed load", "failed loads")}` : "",
    proof ? `difference ${proof.mean.toPrecision(2)} of ${proof.tolerance.toPrecision(2)}` : "",
  ].filter(Boolean);
  return node(
    "span",
    "",
    node("span", `heart ${style}`, ago(Math.max(0, now - since), `${plain(state)} `, "")),
    ready || style === "bad" || style === "off" ? "" : node("span", "quiet", " not ready"),
    figures.length ? node("span", "quiet", ` ${figures.join(" \u00B7 ")}`) : "",
  );
}

function explorer(row, worst, engines) {
  const runs = [row.applied ? pair(row.applied) : "nothing yet"];
  if (row.loading) {
    runs.push(" ", chip(`loading ${pair(row.loading)}`, "accent"));
  }
  const gone = row.heart === "dead" || row.heart === "left";
  const lag = row.lag === null ? "" : row.lag ? node("span", "lag", `${row.lag}`, bar(row.lag / worst, row.lag > 1 ? "wait" : "", "behind")) : "0";
  const status = row.status === "require_sync" ? chip("waits for a version", "accent") : "";
  return [gone ? "faint" : "", [plain(row.id), heart(row), ...engines, node("span", "", ...runs, " ", status), lag, row.leases.join(", "), where(row)]];
}

export function rules(rows) {
  return rows.length ? [node("p", "rules", ...rows.map(rule))] : [];
}

function rule(row) {
  const text = `${row.keep ? "" : "goes: "}${plain(row.rule)} \u00B7 ${count(row.steps, "step", "steps")} \u00B7 ${size(row.bytes)}`;
  return chip(text, row.keep ? "" : "goes");
}

export function steps(rows, left) {
  if (!rows.length) {
    return [node("p", "quiet", "There is no step yet.")];
  }
  return [table(["step", "state", "size", "stays", "why"], rows.map(step)), unfold(rows.length), more(left, "older steps")];
}

const STATES = { complete: "ok", filling: "wait", damaged: "bad" };

function saving(changes) {
  const ratio = `${(changes.whole_bytes / Math.max(changes.bytes, 1)).toFixed(1)}x`;
  return changes.density === null ? ratio : `${ratio}, ${(100 * changes.density).toFixed(2)} % changed`;
}

function step(row) {
  const marks = [node("span", `heart ${STATES[row.state] ?? ""}`, row.state === "filling" ? `${row.present} of ${row.expected ?? "?"}` : row.state)];
  const add = (holds, text, style) => holds && marks.push(" ", chip(plain(text), style));
  add(row.published === "newest", "published", "accent");
  add(row.published === "previous", "published before");
  add(row.full, "full checkpoint");
  add(row.pinned, "pinned");
  add(row.kind !== "weights", row.delta ? `delta of ${row.delta.parent}, ${saving(row.delta)}` : row.kind);
  add(row.delta, row.delta && (row.delta.chain === null ? "chain broken" : `${row.delta.chain} after its keyframe`));
  add(row.shortcut, row.shortcut && (row.shortcut.problem ? "unusable shortcut" : `shortcut from ${row.shortcut.parent}, ${saving(row.shortcut)}`));
  add(row.layout !== "syncd", row.layout);
  const why = [...new Set([reason(row.rule), row.detail, row.problem])].filter(Boolean).map(plain).join(" \u00B7 ");
  return [
    row.keep ? "" : "goes",
    [`${row.step}`, node("span", "", ...marks), size(row.bytes), row.keep ? "stays" : chip("goes", "goes"), node("span", "", why, " ", node("code", "", plain(row.rule)))],
  ];
}

export function events(rows) {
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

// A table that becomes a list of cards where there is no room: each cell carries its column's name.
function table(columns, rows) {
  const cell = (content, place) => {
    const made = node("td", place === 0 ? "first" : "", content);
    made.dataset.name = columns[place];
    made.hidden = content === "";
    return made;
  };
  // The headings are not shown on a phone, and what is not shown is not read out either.
  const head = node("thead", "", node("tr", "", ...columns.map((name) => node("th", "", name))));
  const body = rows.map(([style, cells]) => node("tr", style, ...cells.map(cell)));
  return node("table", "", head, node("tbody", "", ...body));
}

// What shows the rows beyond the first dozen, and hides them again; page.css does the hiding.
function unfold(number) {
  if (number <= FOLD) {
    return "";
  }
  const made = node("button", "", node("span", "shut", `show all ${number}`), node("span", "open", "show fewer"));
  made.type = "button";
  made.addEventListener("click", () => made.parentElement.classList.toggle("unfolded"));
  return made;
}

function more(number, what) {
  return number ? node("p", "quiet", `and ${number} more ${what}`) : "";
}
