// Numbers, durations and names as people read them. No function here touches the page.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

// What others wrote, without what could steer the text around it: control and direction characters.
export function plain(value) {
  return String(value ?? "").replace(/[\p{C}\p{Zl}\p{Zp}]/gu, "\uFFFD");
}

export function size(bytes) {
  let value = bytes;
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return unit ? `${value < 10 ? value.toFixed(1) : Math.round(value)} ${UNITS[unit]}` : `${bytes} B`;
}

// A duration in its two largest units.
export function lasting(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  for (const [unit, name, part, rest] of [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]]) {
    if (whole >= unit) {
      return `${Math.floor(whole / unit)} ${name} ${Math.floor((whole % unit) / part)} ${rest}`;
    }
  }
  return `${whole} s`;
}

export function count(number, one, many) {
  return `${number} ${number === 1 ? one : many}`;
}

export function pair(version) {
  return version ? `${version.generation}.${version.step}` : "none";
}

export function where(module) {
  return module.host ? plain(`${module.host}:${module.pid}`) : "";
}

export function clock(seconds) {
  const date = new Date(seconds * 1000);
  const today = date.toDateString() === new Date().toDateString();
  const time = date.toLocaleTimeString([], { hour12: false });
  return today ? time : `${date.toLocaleDateString([], { month: "short", day: "numeric" })}, ${time}`;
}

const SENTENCES = {
  version_published: (e) => `${e.generation}.${e.step} published${e.reason === "newer" ? "" : ` (${e.reason})`}`,
  step_damaged: (e) => `step ${e.step ?? ""} is damaged: ${e.problem ?? e.detail ?? ""}`,
  step_quarantined: (e) => `step ${e.step} quarantined: ${e.reason}`,
  attempt_pruned: (e) => `unsealed save of step ${e.step} removed`,
  step_pruned: (e) => `step ${e.step} removed: ${e.detail || e.rule}`,
  wave_changed: (e) => `rolling update: ${e.phase}, ${e.candidate ?? "nothing"} is tested, ${e.approved ?? "nothing"} is approved${e.reason ? `: ${e.reason}` : ""}`,
  step_kept: (e) => `step ${e.step} kept by ${e.rule}${e.detail ? `: ${e.detail}` : ""}`,
  version_rewound: (e) => `explorers roll back from ${e.before} to ${e.step} (${e.reason})`,
  leadership_acquired: (e) => `a daemon leads, term ${e.term}`,
  daemon_started: (e) => `a daemon has started, syncd ${e.version}`,
  daemon_stopped: () => "the daemon has stopped",
  explorer_joined: (e) => `explorer ${e.explorer} has joined from ${e.host}`,
  explorer_left: (e) => `explorer ${e.explorer} has left`,
  explorer_died: (e) => `explorer ${e.explorer} is dead: silent for ${lasting(e.silent_for ?? 0)}`,
  engine_state_changed: (e) => `engine of explorer ${e.explorer}: ${e.state}${e.reason ? `: ${e.reason}` : ""}`,
  trainer_joined: (e) => `trainer ${e.trainer} has joined from ${e.host}`,
  trainer_left: (e) => `trainer ${e.trainer} has left`,
  trainer_died: (e) => `trainer ${e.trainer} is dead: silent for ${lasting(e.silent_for ?? 0)}`,
  watch_mode_selected: (e) => `the daemon notices changes by ${e.mode}`,
  marker_rejected: (e) => `the marker: ${e.detail}`,
  version_file_rejected: (e) => `the version file: ${e.detail}`,
  standby_started: (e) => `a daemon stands by: ${e.detail}`,
  leadership_lost: (e) => `a daemon has lost the lead: ${e.detail}`,
  request_completed: (e) => `${e.kind} of step ${e.step} done: ${e.detail}`,
  request_refused: (e) => `${e.kind} of step ${e.step} refused: ${e.detail}`,
  operation_failed: (e) => `${e.code}: ${e.detail}`,
  job_disappeared: (e) => `${e.detail}`,
  mount_state_changed: (e) => `${e.state}: ${e.detail}`,
  config_reloaded: () => "the daemon has read the configuration again",
  config_rejected: (e) => `the daemon refuses the new configuration: ${e.detail}`,
  job_recovered: (e) => `works again after: ${e.after}`,
};
const FRAME = new Set(["event", "level", "at"]);

// An event as one sentence; one that this page does not know as its name and fields.
export function sentence(event) {
  const known = Object.hasOwn(SENTENCES, event.event) ? SENTENCES[event.event] : null;
  if (known) {
    return plain(known(event));
  }
  const fields = Object.entries(event).filter(([key]) => !FRAME.has(key));
  return plain([event.event.replaceAll("_", " "), ...fields.map(([key, value]) => `${key} ${value}`)].join(" \u00B7 "));
}
