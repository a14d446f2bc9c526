// The rules of retention (docs/retention.md) in a few words.

const WORDS = {
  unpublished: "nothing is published yet",
  pruning_off: "pruning is switched off",
  foreign: "another framework wrote it",
  newest_version: "explorers follow it now",
  unreadable_presence: "a presence cannot be read, so an explorer may use it",
  unreadable_directory: "presences or pins cannot be listed, so an explorer may use it",
  unreadable_step: "it cannot be read",
  leased: "an explorer reads it",
  pinned: "an operator or the trainer has pinned it",
  resumed_from: "the trainer would resume from it",
  later_protocol: "sealed by a newer syncd: upgrade",
  full_checkpoint: "a full checkpoint",
  last_good: "the newest version that an engine has shown to run",
  rolled_out: "engines load it, or will, in their turn",
  previous_version: "published before: an explorer may still read it",
  being_written: "being written",
  damaged_lately: "damaged, but not for long: the mount may be in trouble",
  not_yet_published: "sealed, and newer than what is published",
  just_sealed: "sealed late: the trainer may be about to name it",
  may_be_announced: "the trainer may be about to name it",
  keep_last: "one of the newest",
  keep_every: "a multiple of keep_every",
  catch_up: "an explorer catches up by its changes",
  byte_budget: "all steps together exceed max_bytes",
  chain: "a step that is kept depends on it",
  quarantined: "in quarantine",
  superseded: "newer steps are kept",
  keep_full: "newer full checkpoints are kept",
  abandoned: "the trainer resumed from an earlier step",
  stale_partial: "never finished",
  damaged: "damaged for long",
  vacated: "the trainer writes it again",
};

export function reason(rule) {
  return Object.hasOwn(WORDS, rule) ? WORDS[rule] : "";
}
