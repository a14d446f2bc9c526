// Version, trainer, explorers, disk and daemon at a glance.

import { ago, bar, chip, heart, node, put } from "./dom.js";
import { ENGINES } from "./explorers.js";
import { count, pair, plain, size, where } from "./text.js";

const NOTHING = new Set();

export const section = {
  id: "tiles",
  title: "",
  label: "At a glance",
  place: "top",
  update(element, data) {
    put(element, [data.status, data.ls.policy], () => show(data), NOTHING);
  },
};

function tile(title, big, style, ...lines) {
  return node("article", `tile ${style}`, node("h2", "", title), node("p", "big", big), ...lines.map((line) => node("p", "quiet", line)));
}

function show({ status, ls }) {
  return [version(status), trainer(status), explorersTile(status), disk(status, ls), daemon(status)];
}

function version({ version: now, newest_complete: newest, marker, next }) {
  if (!now) {
    const known = newest === null ? ["no step is complete"] : [`step ${newest} is complete`, plain(marker.problem)];
    return tile("Version", "none yet", next ? "" : "wait", ...known);
  }
  const lines = [ago(now.age, "published ")];
  if (now.held) {
    lines.push(chip("held after a rollback", "wait"));
  }
  if (now.previous) {
    lines.push(`after ${pair(now.previous)}`);
  }
  const made = tile("Version", pair(now), now.held ? "wait" : "", ...lines);
  made.title = plain(now.path);
  return made;
}

function trainer({ trainers, version: now, finished }) {
  const living = trainers.filter((item) => item.alive !== false);
  const [first] = living.length ? living : trainers;
  if (!first) {
    return tile("Trainer", "none", "off", "no trainer has joined yet");
  }
  const ahead = now && first.step !== null ? first.step - now.step : 0;
  const others = trainers.length - 1;
  return tile(
    "Trainer",
    finished ? "finished" : first.step === null ? first.status : `step ${first.step}`,
    first.heart === "dead" && !finished ? "bad" : "",
    finished ? `at step ${finished.step}` : heart(first),
    ahead > 0 && !finished ? `${count(ahead, "step", "steps")} ahead of the version` : "",
    where(first),
    others ? `and ${count(others, "other", "others")}` : "",
  );
}

function explorersTile({ explorers, finished }) {
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
    finished || !(dead || useless) ? "" : living.length ? "wait" : "bad",
    living.length ? follow : explorers.length ? `of ${explorers.length} that joined` : "no explorer follows",
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

function daemon({ daemon: found, problem_groups: groups }) {
  const isMissed = groups.some(({ name, severity }) => name === "daemon" && severity === "critical");
  if (!found) {
    return tile("Daemon", "none", isMissed ? "bad" : "", "no daemon has led this job yet");
  }
  const words = { alive: "leads", dead: "dead", left: "has left", unknown: "not seen yet" };
  const style = found.heart === "unknown" ? "wait" : isMissed ? "bad" : "";
  return tile("Daemon", words[found.heart] ?? found.heart, style, where(found), `term ${found.term}`);
}

