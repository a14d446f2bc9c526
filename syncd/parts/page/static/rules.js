// The rules of retention (docs/retention.md) in a few words.

const WORDS = {
  unpublished: "nothing is published yet",
  pruning_off: "pruning is switched off",
  foreign: "somebody else wrote it",
  newest_version: "explorers follow it now",
  unreadable_presence: "somebody's presence cannot be read, so it may be in use",
  unreadable_directory: "presences or pins cannot be listed, so it may be in use",
  unreadable_step: "it cannot be read, so nobody knows what it is",
  leased: "being read",
  pinned: "a person keeps it",
  resumed_from: "the trainer would resume from it",
  later_protocol: "sealed by a later release: upgrade syncd",
  full_checkpoint: "a full checkpoint",
  last_good: "the newest version that an engine has shown to run",
  previous_version: "published before: somebody may still read it",
  being_written: "being written",
  damaged_lately: "damaged, but not for long: the mount may be in trouble",
  not_yet_published: "sealed, and newer than what is published",
  just_sealed: "sealed late: the trainer may be about to name it",
  may_be_announced: "the trainer may be about to name it",
  keep_last: "among the newest",
  keep_every: "every so many are kept",
  catch_up: "an explorer can catch up by its changes",
  byte_budget: "all steps together are too large",
  chain: "a step that stays is stored on it",
  quarantined: "it was put aside",
  superseded: "newer ones are there",
  keep_full: "newer full checkpoints are there",
  abandoned: "the trainer went back below it",
  stale_partial: "never finished",
  damaged: "damaged for long",
  vacated: "the trainer writes it again",
};

export function reason(rule) {
  return Object.hasOwn(WORDS, rule) ? WORDS[rule] : "";
}
