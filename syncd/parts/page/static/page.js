// The page of one job: asks for its data, shows it, and says when it is old or the server has gone.

import { banner, put, tick } from "./dom.js";
import { Feed } from "./feed.js";
import { mount } from "./sections.js";
import { clock, lasting, plain } from "./text.js";

const SCHEMA = 2;
const OLD_AFTER = 10;

const place = (id) => document.getElementById(id);
const update = mount();
const feed = new Feed("data.json", SCHEMA, take, tell);

function take(data) {
  const up = data.serving.overview;
  place("up").hidden = up === null;
  place("up").href = up ?? "";
  if (data.status) {
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

// --- what is wrong with the server, or with what it knows ----------------------------------------------------

function age() {
  const known = feed.latest?.serving.age ?? null;
  return known === null ? null : known + feed.since();
}

function notice() {
  const at = feed.latest?.serving.at;
  const known = at ? ` The page shows the state of ${clock(at)}, ${lasting(age() ?? 0)} ago.` : "";
  return feed.trouble(known) ?? (feed.latest ? poll(feed.latest.serving, known) : null);
}

function poll({ state, error, looking_for: since, every }, known) {
  if (state === "stuck") {
    return ["bad", `A scan of the job has not returned for ${lasting(since)}: its mount may not answer.${known}`];
  }
  if (state === "failing") {
    return ["bad", `The last scan failed: ${plain(error.message)}.${known}`, error.hint];
  }
  if (state === "starting") {
    return ["wait", `The first scan of the job has taken ${lasting(since ?? 0)} so far.`];
  }
  return !feed.asking && age() > Math.max(OLD_AFTER, 4 * every) ? ["wait", `The data is old.${known}`] : null;
}

function tell() {
  const found = notice();
  put(place("notices"), found, () => (found ? [banner(...found)] : []));
  const stale = feed.lost !== null || (feed.latest !== null && feed.latest.serving.state !== "fresh");
  document.body.classList.toggle("stale", stale);
  const [text, style] = words();
  put(place("link"), text, () => [text]);
  place("link").className = `pill ${style}`;
  tick();
  title(stale);
}

function words() {
  if (feed.lost) {
    return [feed.isGone ? "gone" : "no answer", "bad"];
  }
  const state = feed.latest?.serving.state;
  return { undefined: ["connecting", "wait"], fresh: ["live", "ok"], starting: ["starting", "wait"] }[state] ?? [state, "bad"];
}

function title(stale) {
  const status = feed.latest?.status;
  if (status) {
    const version = status.version ? `${status.version.generation}.${status.version.step}` : "no version";
    const mark = stale ? "\u26A0 " : status.finished ? "\u2713 " : "";
    document.title = `${mark}${version} \u00B7 ${place("job").textContent}`;
  }
}

feed.start();
