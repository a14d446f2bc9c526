// Each step, and the rule that keeps or removes it.

import { chip, more, node, put, table, unfold } from "./dom.js";
import { reason } from "./rules.js";
import { count, plain, size } from "./text.js";

const MANY = 8;

export const section = {
  id: "steps",
  title: "Steps, and why each is kept or removed",
  place: "left",
  update(element, { status, ls, rules: all, left_out: left }) {
    const sums = status.steps.total > MANY ? all : [];
    put(element, [sums, ls.steps], () => [...rules(sums), ...show(ls.steps, left.steps)]);
  },
};

function rules(rows) {
  return rows.length ? [node("p", "rules", ...rows.map(rule))] : [];
}

function rule(row) {
  const text = `${row.keep ? "" : "removed: "}${plain(row.rule)} \u00B7 ${count(row.steps, "step", "steps")} \u00B7 ${size(row.bytes)}`;
  return chip(text, row.keep ? "" : "goes");
}

function show(rows, left) {
  if (!rows.length) {
    return [node("p", "quiet", "There is no step yet.")];
  }
  return [table(["step", "state", "size", "kept", "why"], rows.map(step)), unfold(rows.length), more(left, "older steps")];
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
    [`${row.step}`, node("span", "", ...marks), size(row.bytes), row.keep ? "kept" : chip("removed", "goes"), node("span", "", why, " ", node("code", "", plain(row.rule)))],
  ];
}

