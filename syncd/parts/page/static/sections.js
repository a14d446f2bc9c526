// The sections of a job's page, each in its region in this order.
//
// A section is a module with an object `section`:
//   id      of the element that it fills
//   title   its heading; empty for none, then `label` names it for screen readers
//   place   top (the whole width), left, side (beside left on a wide screen) or below (the whole width)
//   update  is given that element and each document of data.json that shows a job (docs/json.md)
// `put` of dom.js builds an element anew only when its values have changed.

import { node } from "./dom.js";
import { section as charts } from "./charts.js";
import { section as events } from "./events.js";
import { section as explorers } from "./explorers.js";
import { section as filling } from "./filling.js";
import { section as lanes } from "./lanes.js";
import { section as problems } from "./problems.js";
import { section as progress } from "./progress.js";
import { section as rolling } from "./rolling.js";
import { section as rollouts } from "./rollouts.js";
import { section as steps } from "./steps.js";
import { section as tiles } from "./tiles.js";

const SECTIONS = [progress, problems, tiles, filling, explorers, rolling, steps, events, lanes, charts, rollouts];

// Makes the element of each section, and returns what shows a document in all of them.
export function mount() {
  const elements = SECTIONS.map(frame);
  return (data) => SECTIONS.forEach((section, place) => section.update(elements[place], data));
}

function frame({ id, title, label, place }) {
  const element = node("div", "");
  element.id = id;
  const whole = node("section", "", title && node("h2", "", title), element);
  whole.setAttribute("aria-label", title || label);
  document.getElementById(place).append(whole);
  return element;
}
