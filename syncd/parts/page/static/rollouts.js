// The rollouts that are kept, newest first, and one of them: from rollouts.json, asked for while the section is open.

import { node, put, table } from "./dom.js";
import { request } from "./feed.js";
import { rollout } from "./rollout.js";
import { clock, count, plain } from "./text.js";

const SCHEMA = 1;
const EVERY = 10000;
const FILTERS = [
  ["task", "task", "search"],
  ["group", "group", "search"],
  ["version", "version, such as 1.40", "text"],
  ["reward_min", "reward from", "number"],
  ["reward_max", "to", "number"],
];

export const section = {
  id: "rollouts",
  title: "Rollouts",
  place: "below",
  update(element) {
    if (!element.firstChild) {
      build(element);
    }
    if (state.details.open && performance.now() >= state.next) {
      ask();
    }
  },
};

const state = { next: 0, from: 0, details: null, list: null, one: null, fields: null };

function build(element) {
  state.list = node("div", "unfolded");
  state.one = node("div", "");
  state.fields = filters();
  state.details = node("details", "", node("summary", "", "Rollouts: prompts and answers of the model"), state.fields, state.one, state.list);
  state.details.addEventListener("toggle", () => state.details.open && ask());
  element.append(state.details);
}

function filters() {
  const form = node("form", "filters", ...FILTERS.map(([name, text, type]) => field(name, text, type)));
  form.setAttribute("aria-label", "Filter rollouts");
  form.addEventListener("input", () => {
    state.from = 0;
    ask();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  return form;
}

function field(name, text, type) {
  const input = node("input", "");
  Object.assign(input, { name, type });
  if (type === "number") {
    input.step = "any";
  }
  return node("label", "", node("span", "", text), input);
}

function asked() {
  const given = [...new FormData(state.fields)].filter(([, value]) => value !== "");
  return `${new URLSearchParams([...given, ["from", state.from]])}`;
}

async function ask() {
  state.next = performance.now() + EVERY;
  const query = asked();
  try {
    const answer = await request(`rollouts.json?${query}`);
    const found = answer.ok ? await answer.json() : null;
    if (query !== asked()) {
      return; // the filters have changed meanwhile, and were asked for
    }
    if (found?.schema_version === SCHEMA) {
      show(found);
    } else if (answer.status === 404) {
      put(state.list, query, () => [node("p", "quiet", "One of the filters cannot be read.")]);
    }
  } catch {
    // data.json of the same server is asked for too, and the page says that nobody answers
  }
}

function show(found) {
  state.fields.hidden = !found.enabled;
  if (!found.enabled) {
    put(state.list, false, () => [node("p", "quiet", "This server does not show rollouts, because everybody who reaches it could read prompts and answers. ", node("code", "", "syncd serve JOB --rollouts"), " shows them.")]);
    return;
  }
  const { serving, rollouts, batches, found: fitting, known, unreadable, rejected } = found;
  put(state.list, [serving.state, serving.error, rollouts, batches, fitting, known, unreadable, rejected], () => [
    ...notes(serving),
    node("p", "quiet", `${fitting === known ? "" : `${fitting} of `}${count(known, "rollout", "rollouts")} of ${count(batches.read, "batch", "batches")}${batches.unread ? `; ${count(batches.unread, "older batch is", "older batches are")} not listed` : ""}.`),
    rollouts.length ? table(["task", "reward", "versions", "tokens", "group", "made", "from"], rollouts.map(row)) : node("p", "quiet", nothing(serving, known)),
    pager(rollouts.length, fitting, found.rows),
    ...bad("Batches that cannot be read", unreadable.map((one) => [`${one.explorer}/${one.batch}`, one.reason])),
    ...bad("Files that the trainer has rejected", rejected.map((one) => [`${one.explorer}/${one.name}`, one.reason])),
  ], new Set());
}

function notes({ state: how, error, at }) {
  if (how === "stuck" || how === "failing") {
    const known = at ? ` The list shows ${clock(at)}.` : "";
    return [node("p", "notice wait", `${error ? plain(error.message) : "The files do not answer"}.${known}`, error?.hint ? node("code", "", plain(error.hint)) : "")];
  }
  return [];
}

function nothing({ state: how }, known) {
  if (how === "starting") {
    return "The batches are being read.";
  }
  return known ? "No rollout matches the filters." : "No batch waits for the trainer, and none is kept: with [data] consumed = \"archive\" the trainer keeps what it has used.";
}

function row(one) {
  const open = node("button", "link", plain(one.task));
  open.type = "button";
  open.addEventListener("click", () => {
    rollout(state.one, one);
    state.one.scrollIntoView({ block: "nearest" });
  });
  const [oldest, newest] = [one.versions[0], one.versions.at(-1)].map(([generation, step]) => `${generation}.${step}`);
  const tokens = `${one.prompt_tokens} + ${one.response_tokens}`;
  const parts = [one.segments > 1 ? `${one.segments} segments` : "", one.unproven_tokens ? `${one.unproven_tokens} unproven` : ""].filter(Boolean).join(", ");
  return ["", [open, `${Number(one.reward.toPrecision(4))}`, oldest === newest ? oldest : `${oldest} to ${newest}`, parts ? `${tokens} (${parts})` : tokens, `${plain(one.group)} #${one.rollout}`, clock(one.created_at), `${plain(one.explorer)}/${one.batch}`]];
}

function pager(shown, fitting, rows) {
  const turn = (text, by, holds) => {
    if (!holds) {
      return "";
    }
    const made = node("button", "", text);
    made.type = "button";
    made.addEventListener("click", () => {
      state.from = Math.max(state.from + by, 0);
      ask();
    });
    return made;
  };
  const last = state.from + shown;
  return node("p", "pager", turn("newer", -rows, state.from > 0), last < fitting || state.from ? `${state.from + 1} to ${last} of ${fitting}` : "", turn("older", rows, last < fitting));
}

function bad(what, rows) {
  if (!rows.length) {
    return [];
  }
  const list = node("ul", "rows", ...rows.map(([name, reason]) => node("li", "", node("strong", "", plain(name)), ` ${plain(reason)}`)));
  return [node("details", "bad-files", node("summary", "", `${what}: ${rows.length}`), list)];
}
