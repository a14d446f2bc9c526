// Asks for the data, shows it, and says when it is old or the server has gone.

import { node, put, tick } from "./dom.js";
import { mount } from "./sections.js";
import { clock, lasting, plain } from "./text.js";

const SCHEMA = 2;
const ANSWER_WITHIN = 8000;
const LEAST = 500;
const MOST = 30000;
const OLD_AFTER = 10;
const MOST_PROBLEMS = 6;
const MENDS = new Set(["dead", "config", "engine_refused", "engine_failed"]);

const place = (id) => document.getElementById(id);
const link = { failures: 0, lost: null, next: 0, asking: false, timer: 0 };
const update = mount();
let latest = null;
let got = 0;

async function ask() {
  if (link.asking) {
    return;
  }
  link.asking = true;
  clearTimeout(link.timer);
  try {
    const answer = await fetch("data.json", { cache: "no-store", signal: AbortSignal.timeout(ANSWER_WITHIN) });
    if (!answer.ok) {
      throw new Error(`status ${answer.status}`);
    }
    take(await answer.json());
    link.failures = 0;
    link.lost = null;
  } catch {
    link.failures += 1;
    link.lost ??= new Date();
  } finally {
    link.asking = false;
  }
  plan();
  tell();
}

// After each failure twice as long as before, never in step with other viewers; not at all while nobody looks.
function plan() {
  const every = Math.max((latest?.serving.every ?? 2) * 1000, LEAST);
  const wait = link.failures ? Math.min(every * 2 ** link.failures, MOST) * (0.8 + 0.4 * Math.random()) : every;
  link.next = performance.now() + wait;
  if (!document.hidden) {
    link.timer = setTimeout(ask, wait);
  }
}

function take(data) {
  latest = data;
  got = performance.now();
  if (data.schema_version === SCHEMA && data.status) {
    show(data);
  }
}

function show(data) {
  place("main").hidden = false;
  const job = plain(data.status.job);
  const name = job.split("/").filter(Boolean).at(-1) ?? job;
  put(place("job"), name, () => [name]);
  put(place("place"), job, () => [job]);
  put(place("foot"), data.ls.policy, () => [foot(data)]);
  update(data);
}

function foot({ serving, status, ls }) {
  const { keep_last: last, keep_every: every, keep_full: full, prune } = ls.policy;
  const kept = prune ? `keeps the newest ${last}${every ? `, each ${every}th` : ""}, ${full || "all"} full checkpoints` : "removes nothing";
  return plain(`syncd ${serving.syncd} \u00B7 this policy ${kept} \u00B7 ${status.disk.mount} (${status.disk.type})`);
}

// --- what is wrong, also with this page itself ---------------------------------------------------------------

function age() {
  return latest?.serving.age === null || !latest ? null : latest.serving.age + (performance.now() - got) / 1000;
}

function notices() {
  const found = [];
  const add = (style, text, hint) => found.push([style, text, hint ?? ""]);
  const known = latest?.serving.at ? ` Shown is what was known at ${clock(latest.serving.at)}, ${lasting(age() ?? 0)} ago.` : "";
  if (link.lost) {
    const wait = Math.max(0, (link.next - performance.now()) / 1000);
    add("bad", `No answer from the server since ${clock(link.lost / 1000)}.${known} Next try ${link.asking ? "now" : `in ${lasting(wait)}`}.`);
  } else if (latest) {
    server(latest, known, add);
  }
  const problems = latest?.status?.problems ?? [];
  for (const { name, detail } of problems.slice(0, MOST_PROBLEMS)) {
    add(MENDS.has(name) ? "wait" : "bad", `${plain(name).replaceAll("_", " ")}: ${plain(detail)}`);
  }
  const others = problems.length - MOST_PROBLEMS + (latest?.left_out.problems ?? 0);
  if (others > 0) {
    add("bad", `and ${others} more, which syncd status shows`);
  }
  return found;
}

function server({ serving, schema_version: schema }, known, add) {
  const hint = serving.error?.hint;
  if (schema !== SCHEMA) {
    add("bad", "The server is of another version than this page: reload the page.");
  } else if (serving.state === "stuck") {
    add("bad", `A look at the job has not come back for ${lasting(serving.looking_for)}: its mount may be dead.${known}`);
  } else if (serving.state === "failing") {
    add("bad", `The last look failed: ${plain(serving.error.message)}.${known}`, hint && plain(hint));
  } else if (serving.state === "starting") {
    add("wait", `The first look at the job takes ${lasting(serving.looking_for ?? 0)} so far.`);
  } else if (!link.asking && age() > Math.max(OLD_AFTER, 4 * serving.every)) {
    add("wait", `The data is old.${known}`);
  }
}

function tell() {
  const found = notices();
  put(place("notices"), found, () => found.map(([style, text, hint]) => node("p", `notice ${style}`, text, hint ? node("code", "", hint) : "")));
  const stale = link.lost !== null || (latest !== null && latest.serving.state !== "fresh");
  document.body.classList.toggle("stale", stale);
  const pill = link.lost ? ["no answer", "bad"] : words();
  put(place("link"), pill[0], () => [pill[0]]);
  place("link").className = `pill ${pill[1]}`;
  tick();
  title(stale);
}

function words() {
  if (!latest) {
    return ["connecting", "wait"];
  }
  const state = latest.serving.state;
  return state === "fresh" ? ["live", "ok"] : [state, state === "starting" ? "wait" : "bad"];
}

function title(stale) {
  const status = latest?.status;
  if (status) {
    const version = status.version ? `${status.version.generation}.${status.version.step}` : "no version";
    document.title = `${stale ? "\u26A0 " : ""}${version} \u00B7 ${place("job").textContent}`;
  }
}

document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(link.timer) : ask()));
addEventListener("online", ask);
setInterval(tell, 1000);
ask();
