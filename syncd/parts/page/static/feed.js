// Asks the server for one document again and again, and knows how old the last answer is.

import { clock, lasting } from "./text.js";

const ANSWER_WITHIN = 8000;
const LEAST = 500;
const MOST = 30000;

// Asks once; fails if no answer has come after a while.
export function request(address) {
  return fetch(address, { cache: "no-store", signal: AbortSignal.timeout(ANSWER_WITHIN) });
}

// Args: the document's address, its schema_version, `show`, which is given each document of that version, and `tell`,
// which is called after each answer and once a second.
export class Feed {
  constructor(address, schema, show, tell) {
    Object.assign(this, { address, schema, show, tell, latest: null, lost: null, asking: false });
    Object.assign(this, { isGone: false, got: 0, failures: 0, next: 0, timer: 0 });
  }

  start() {
    document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(this.timer) : this.ask()));
    addEventListener("online", () => this.ask());
    setInterval(() => this.tell(), 1000);
    this.ask();
  }

  async ask() {
    if (this.asking) {
      return;
    }
    this.asking = true;
    clearTimeout(this.timer);
    let status = 0;
    try {
      const answer = await request(this.address);
      status = answer.status;
      if (!answer.ok) {
        throw new Error(`status ${status}`);
      }
      this.take(await answer.json());
      this.failures = 0;
      this.lost = null;
    } catch {
      this.isGone = status === 404;
      this.failures += 1;
      this.lost ??= new Date();
    } finally {
      this.asking = false;
    }
    this.plan();
    this.tell();
  }

  take(data) {
    this.latest = data;
    this.got = performance.now();
    if (this.fits()) {
      this.show(data);
    }
  }

  fits() {
    return this.latest?.schema_version === this.schema;
  }

  // After each failure twice as long as before, never in step with other viewers; not at all while nobody looks.
  plan() {
    const every = Math.max((this.latest?.serving.every ?? 2) * 1000, LEAST);
    const wait = this.failures ? Math.min(every * 2 ** this.failures, MOST) * (0.8 + 0.4 * Math.random()) : every;
    this.next = performance.now() + wait;
    if (!document.hidden) {
      this.timer = setTimeout(() => this.ask(), wait);
    }
  }

  // Seconds since the last answer.
  since() {
    return (performance.now() - this.got) / 1000;
  }

  // What is wrong with the way to the server, as [style, text]; null if nothing is.
  trouble(known) {
    if (this.lost) {
      const wait = Math.max(0, (this.next - performance.now()) / 1000);
      const again = this.asking ? "now" : `in ${lasting(wait)}`;
      if (this.isGone) {
        return ["bad", `The server has not had this job since ${clock(this.lost / 1000)}: its directory was removed, or the server serves other jobs now.${known}`];
      }
      return ["bad", `No answer from the server since ${clock(this.lost / 1000)}.${known} Next try ${again}.`];
    }
    if (this.latest && !this.fits()) {
      return ["bad", "The server has another version than this page: reload the page."];
    }
    return null;
  }
}
