// Several jobs, one line each: a click goes to the job's page.

import { ago, banner, node, put, table, tick } from "./dom.js";
import { Feed } from "./feed.js";
import { count, lasting, pair, plain } from "./text.js";

const SCHEMA = 1;
const STYLES = { critical: "bad", warning: "wait", notice: "off", ok: "ok", unknown: "wait" };
const LONG_NAME = 40;
const MOVING = new Set(["age", "at", "looking_for", "published"]);
const COLUMNS = ["job", "health", "version", "trainer", "explorers", "what is wrong"];

const place = (id) => document.getElementById(id);
const feed = new Feed("jobs.json", SCHEMA, show, tell);

function show({ serving, jobs }) {
  place("main").hidden = false;
  const left = serving.left_out ? `, and ${serving.left_out} more that are not shown` : "";
  const where = serving.root ? ` below ${plain(serving.root.path)}` : "";
  const text = `${count(jobs.length, "job", "jobs")}${where}${left}`;
  put(place("place"), text, () => [text]);
  put(place("main"), jobs, () => (jobs.length ? [table(COLUMNS, jobs.map(row))] : [empty(serving)]), MOVING);
  put(place("foot"), serving.syncd, () => [`syncd ${serving.syncd}`]);
  document.title = title(jobs);
}

function row(job) {
  const state = node("span", `heart ${STYLES[job.severity]}`, word(job));
  const link = node("a", job.name.length > LONG_NAME ? "" : "whole", plain(job.name));
  link.href = job.href;
  link.title = plain(job.job);
  return ["", [link, state, version(job), trainer(job), explorers(job), plain(job.attention)]];
}

function word({ severity, state, finished, empty: isEmpty }) {
  if (state !== "fresh" || severity === "critical" || severity === "warning") {
    return state === "fresh" ? severity : state;
  }
  return finished ? "finished" : isEmpty ? "empty" : "ok";
}

function version({ version: now, published }) {
  return now ? node("span", "", node("strong", "", pair(now)), " ", node("span", "quiet", ago(published, "", " ago"))) : "none yet";
}

function trainer({ trainer: found, finished }) {
  if (finished) {
    return `finished at step ${finished.step}`;
  }
  if (!found) {
    return "";
  }
  const step = found.step === null ? plain(found.status) : `step ${found.step}`;
  return found.heart === "dead" || found.heart === "left" ? `${step}, ${found.heart === "dead" ? "dead" : "has left"}` : step;
}

function explorers({ explorers: here, dead, lag }) {
  const parts = [`${here}`, dead ? `${dead} dead` : "", lag ? `at most ${count(lag, "step", "steps")} behind` : ""];
  return here || dead ? parts.filter(Boolean).join(", ") : "";
}

function empty({ root }) {
  const text = root ? `No job below ${plain(root.path)} yet: a job has .syncd, a marker or steps.` : "No job.";
  return node("p", "quiet", text);
}

function title(jobs) {
  const bad = jobs.filter((job) => job.severity === "critical").length;
  return `${bad ? `\u26A0 ${bad} of ` : ""}${count(jobs.length, "job", "jobs")} \u00B7 syncd`;
}

function notice() {
  const found = feed.trouble(" The page shows the last known state.");
  const root = feed.latest?.serving.root;
  if (found || !root || root.state === "fresh") {
    return found;
  }
  if (root.state === "failing") {
    return ["bad", `New jobs cannot be found: ${plain(root.error.message)}.`, root.error.hint];
  }
  return ["wait", `The search for jobs has taken ${lasting(root.looking_for ?? 0)} so far.`];
}

function tell() {
  const found = notice();
  put(place("notices"), found, () => (found ? [banner(...found)] : []));
  document.body.classList.toggle("stale", feed.lost !== null);
  const text = feed.lost ? "no answer" : feed.latest ? "live" : "connecting";
  put(place("link"), text, () => [text]);
  place("link").className = `pill ${feed.lost ? "bad" : feed.latest ? "ok" : "wait"}`;
  tick();
}

feed.start();
