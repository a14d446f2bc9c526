// One rollout: its tokens in the colour of the version that chose them, with log-probs, rewards and what else is known.

import { chip, node } from "./dom.js";
import { request } from "./feed.js";
import { clock, count, plain } from "./text.js";

const SCHEMA = 1;
const AGAIN = 1000;
const COLOURS = 6;

let wanted = 0;

// Shows a segment of a rollout in an element, from a token of its response on.
export async function rollout(element, one, segment = 0, from = 0) {
  const mine = ++wanted;
  element.replaceChildren(card(one, node("p", "quiet", "Reading the batch.")));
  const query = new URLSearchParams({ explorer: one.explorer, batch: one.batch, row: one.row, segment, from });
  let found = { state: "reading" };
  while (found.state === "reading" && wanted === mine && element.firstChild) {
    found = await read(query);
    if (found.state === "reading") {
      await new Promise((resolve) => setTimeout(resolve, AGAIN));
    }
  }
  if (wanted === mine && element.firstChild) {
    const go = (number, start) => rollout(element, one, number, start);
    element.replaceChildren(card(one, ...(found.state === "ready" ? parts(found, go) : [problem(found)])));
  }
}

async function read(query) {
  try {
    const answer = await request(`rollout.json?${query}`);
    const found = await answer.json();
    return found.schema_version === SCHEMA ? found : { state: "failed", error: { message: "reload the page", hint: null } };
  } catch {
    return { state: "failed", error: { message: "the server did not answer", hint: null } };
  }
}

function problem({ error }) {
  return node("p", "notice wait", `${plain(error.message)}.`, error.hint ? node("code", "", plain(error.hint)) : "");
}

function card(one, ...content) {
  const close = node("button", "link", "close");
  close.type = "button";
  const whole = node("article", "rollout", node("header", "", node("h3", "", plain(one.task)), close), ...content);
  close.addEventListener("click", () => {
    wanted += 1;
    whole.remove();
  });
  return whole;
}

function parts(found, go) {
  const { prompt, response } = found;
  const told = node("p", "told quiet");
  told.setAttribute("role", "status");
  told.textContent = HINT;
  return [
    facts(found),
    turns(found, go),
    found.text_missing ? node("p", "quiet", `Shown as ids: ${plain(found.text_missing)}.`) : "",
    node("h4", "", `Prompt, ${count(prompt.length, "token", "tokens")}`),
    node("p", "tokens", ...prompt.ids.map((id, place) => words(prompt.texts ? prompt.texts[place] : `${id} `))),
    prompt.ids.length < prompt.length ? node("p", "quiet", `and ${prompt.length - prompt.ids.length} more`) : "",
    node("h4", "", `Response, ${count(response.length, "token", "tokens")}`),
    legend(response),
    answer(response, told),
    told,
    pages(found, go),
    ...information(found),
  ];
}

const HINT = "Point at a token, or use the arrow keys, for its id, log-prob and version.";

function facts(found) {
  const rewards = found.turn_rewards.map(([end, reward]) => `${number(reward)} up to token ${end}`);
  const lines = [
    ["reward", number(found.reward)],
    ["rewards of turns", rewards.join(", ")],
    ["group", `${plain(found.group)}, rollout ${found.rollout}`],
    ["made", clock(found.created_at)],
    ["batch", found.archived ? "used by the trainer, and kept" : "waits for the trainer"],
  ];
  return node("dl", "", ...lines.filter(([, value]) => value).flatMap(([name, value]) => [node("dt", "", name), node("dd", "", value)]));
}

function number(value) {
  return `${Number(value.toPrecision(5))}`;
}

function turns({ segment, segments }, go) {
  if (segments < 2) {
    return "";
  }
  return node("p", "pager", press("previous", segment > 0, () => go(segment - 1, 0)), `segment ${segment + 1} of ${segments}`, press("next", segment + 1 < segments, () => go(segment + 1, 0)));
}

function pages({ segment, response }, go) {
  const last = response.from + response.ids.length;
  if (!response.from && last >= response.length) {
    return "";
  }
  const size = 2000;
  return node("p", "pager", press("earlier", response.from > 0, () => go(segment, Math.max(response.from - size, 0))), `tokens ${response.from + 1} to ${last}`, press("later", last < response.length, () => go(segment, last)));
}

function press(text, holds, run) {
  const made = node("button", "", text);
  made.type = "button";
  made.disabled = !holds;
  made.addEventListener("click", run);
  return made;
}

function labels({ versions }) {
  return [...new Set(versions.map(([, generation, step]) => `${generation}.${step}`))];
}

function legend(response) {
  const names = labels(response);
  const marks = [response.chosen.includes(0) ? node("span", "token masked", "not chosen by the model") : "", response.unproven?.includes(1) ? node("span", "token unproven", "version not proven") : ""];
  return node("p", "legend", ...names.map((name, place) => chip(name, `v${place % COLOURS}`)), ...marks);
}

// The text of a token: control characters are replaced, but line ends and tabs are kept.
function words(text) {
  return text.split(/([\n\t])/).map((part) => (part === "\n" || part === "\t" ? part : plain(part))).join("");
}

function answer(response, told) {
  const names = labels(response);
  let span = -1;
  const tokens = response.ids.map((id, place) => {
    while (span + 1 < response.versions.length && response.versions[span + 1][0] <= response.from + place) {
      span += 1;
    }
    const name = `${response.versions[span][1]}.${response.versions[span][2]}`;
    const made = node("span", `token v${names.indexOf(name) % COLOURS}${response.chosen[place] ? "" : " masked"}${response.unproven?.[place] ? " unproven" : ""}`, response.texts ? words(response.texts[place]) : `${id} `);
    made.told = tell(response, place, id, name);
    return made;
  });
  return movable(node("p", "tokens", ...tokens), tokens, told);
}

function tell(response, place, id, version) {
  const value = response.logprobs[place];
  return [
    `token ${response.from + place + 1}`,
    `id ${id}`,
    `version ${version}${response.unproven?.[place] ? " (not proven)" : ""}`,
    response.chosen[place] ? `log-prob ${value.toFixed(3)} (${(100 * Math.exp(value)).toFixed(1)} %)` : "not chosen by the model",
    response.teacher_logprobs ? `teacher ${response.teacher_logprobs[place].toFixed(3)}` : "",
  ].filter(Boolean).join(" \u00B7 ");
}

// Tells of the token under the mouse, and lets the arrow keys go from token to token.
function movable(whole, tokens, told) {
  let at = -1;
  const choose = (place) => {
    tokens[at]?.classList.remove("at");
    at = Math.min(Math.max(place, 0), tokens.length - 1);
    tokens[at].classList.add("at");
    told.textContent = tokens[at].told;
  };
  whole.tabIndex = 0;
  whole.setAttribute("role", "group");
  whole.setAttribute("aria-label", "Tokens of the response; arrow keys go from one to the next");
  whole.addEventListener("pointerover", (event) => event.target.told && choose(tokens.indexOf(event.target)));
  whole.addEventListener("keydown", (event) => {
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: tokens.length - 1 }[event.key];
    if (to !== undefined) {
      event.preventDefault();
      choose(to);
    }
  });
  return whole;
}

// What the explorer noted beside: parts of the reward, the task, anything.
function information({ info }) {
  const rows = Object.entries(info);
  if (!rows.length) {
    return [];
  }
  const text = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 1));
  return [node("h4", "", "Noted by the explorer"), node("dl", "info", ...rows.flatMap(([name, value]) => [node("dt", "", plain(name)), node("dd", "", words(text(value)))]))];
}
