// Where the job stands as a whole: finished, or which command comes next for one that is empty.

import { ago, command, node, put } from "./dom.js";
import { lasting, pair, plain } from "./text.js";

export const section = {
  id: "progress",
  title: "",
  label: "Progress of the job",
  place: "top",
  update(element, { status, ran }) {
    const { finished, next, version } = status;
    put(element, [finished, next, ran, version && pair(version)], () => [
      finished ? end(finished, ran, version) : "",
      next ? node("div", "notice", node("p", "", node("strong", "severity", "next"), " ", plain(next.why)), command(next.command)) : "",
    ]);
  },
};

function end({ step, reason }, ran, version) {
  const lasted = ran === null ? "" : `, ${lasting(ran)} after the daemon's first event`;
  const last = version ? node("p", "quiet", `The last version is ${pair(version)}, `, ago(version.age, "published "), `${lasted}.`) : "";
  return node("div", "notice ok", node("p", "", node("strong", "severity", "finished"), ` at step ${step}: ${plain(reason)}`), last);
}
