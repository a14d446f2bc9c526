// What sections are built from. Everything becomes text nodes: nothing that a job directory holds is ever markup.

import { lasting, plain } from "./text.js";

// Rows of a table that are seen at first.
export const FOLD = 12;

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

export function bar(share, style, label) {
  const made = document.createElement("progress");
  made.max = 1;
  made.value = Math.min(Math.max(share, 0), 1);
  made.className = style;
  made.setAttribute("aria-label", label);
  return made;
}

export function chip(text, style = "") {
  return node("span", `chip ${style}`, text);
}

// A command that can be copied: by a button where the browser allows it, and with one click on it anywhere.
export function command(text) {
  const shown = plain(text);
  const made = node("p", "command", node("code", "", shown));
  if (navigator.clipboard) {
    const button = node("button", "copy", "copy");
    button.type = "button";
    button.setAttribute("aria-label", `copy: ${shown}`);
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(shown);
      button.textContent = "copied";
    });
    made.append(button);
  }
  return made;
}

// A line across the page, with the command that helps.
export function banner(style, text, hint) {
  return node("div", `notice ${style}`, node("p", "", text), hint ? command(hint) : "");
}

const HEARTS = { alive: "ok", dead: "bad", left: "off", unknown: "wait" };

export function heart(module) {
  const style = HEARTS[module.heart] ?? "wait";
  const text = module.heart === "unknown" ? ago(module.beat_age, "heartbeat ~ ") : module.heart;
  return node("span", `heart ${style}`, text);
}

// Shows what `build` returns in an element, and builds it anew only when `value` has changed: a selection and a reader's
// place are not lost twice a second. `MOVING` fields change all the time and are told by `ago` instead.
const MOVING = new Set(["age", "beat_age", "at", "free"]);
const known = new WeakMap();

export function put(element, value, build, moving = MOVING) {
  const text = JSON.stringify(value, (key, item) => (moving.has(key) ? undefined : item));
  if (known.get(element) !== text) {
    known.set(element, text);
    element.replaceChildren(...build().filter((part) => part !== ""));
  }
}

// A table that becomes a list of cards where there is no room: each cell carries its column's name.
export function table(columns, rows) {
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
export function unfold(number) {
  if (number <= FOLD) {
    return "";
  }
  const made = node("button", "", node("span", "shut", `show all ${number}`), node("span", "open", "show fewer"));
  made.type = "button";
  made.addEventListener("click", () => made.parentElement.classList.toggle("unfolded"));
  return made;
}

export function more(number, what) {
  return number ? node("p", "quiet", `and ${number} more ${what}`) : "";
}
