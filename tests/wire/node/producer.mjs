// A producer for streamfleet, written from docs/protocol.md alone.

import { createHash, createHmac, randomBytes } from "node:crypto";
import { decode, encode } from "@msgpack/msgpack";
import Redis from "ioredis";

const SILENCE_MS = 3000;
const PAGE = 1000;
const STATES = { Q: "queued", R: "running", D: "done", F: "failed", C: "cancelled", X: "expired", P: "dead" };

/** A frame's place, times (of a start or an end) and event; without its event if that is in the log. */
function parse(frame) {
  const space = frame.indexOf(" ");
  const [place, ...times] = frame.toString("latin1", 0, space).split(",");
  const [epoch, seq] = place.split("-").map(Number);
  const body = frame.subarray(space + 1);
  return { place, epoch, seq, isEnd: seq > 0 && times.length > 0, event: body.length ? decode(body) : null };
}

export class Producer {
  #redis;
  #ear;
  #listeners = new Map();

  /** `scripts`: the texts of submit.lua and cancel.lua, as they are sent. */
  constructor(url, queue, { scripts, tenant = "default", secret = tenant, silenceMs = SILENCE_MS }) {
    Object.assign(this, { tag: `{q:${queue}:0}`, queue, tenant, secret, silenceMs });
    this.#redis = new Redis(url);
    this.#ear = new Redis(url);
    this.#redis.defineCommand("submit", { numberOfKeys: 1, lua: scripts.submit });
    this.#redis.defineCommand("cancel", { numberOfKeys: 1, lua: scripts.cancel });
    this.#ear.on("messageBuffer", (channel, frame) => this.#listeners.get(`${channel}`)?.push(frame));
    // The line was lost and is back: whoever listens may have missed something.
    this.#ear.on("ready", () => this.#listeners.forEach((listener) => listener.push(null)));
  }

  async close() {
    await Promise.all([this.#redis.quit(), this.#ear.quit()]);
  }

  /** A fresh id, or the one that stands for an idempotency key. */
  rid(key) {
    const bits = key === undefined ? randomBytes(16) : createHmac("sha256", this.secret).update(key).digest();
    return "00" + bits.toString("hex").slice(0, 32);
  }

  /** Hand a request in. Gives its id, and "accepted", or "duplicate" if it was in before. */
  async submit(request, { rid, key, stream = false, lane = "normal", deadlineMs = 600000, ttlMs = 600000 } = {}) {
    if (!(await this.#redis.hexists("streamfleet:queues", this.queue))) {
      throw new Error(`nobody has ever served the queue ${this.queue}`);
    }
    rid ??= this.rid(key);
    const packed = encode(request);
    const digest = createHash("sha256").update(packed).digest("hex").slice(0, 32);
    const envelope = { v: 1, rid, tenant: this.tenant, lane, stream, deadline_ms: deadlineMs, result_ttl_ms: ttlMs };
    if (key !== undefined) envelope.idempotency_key = key;
    const payload = Buffer.from(encode({ ...envelope, request }));
    const { max_tokens: most = 128, n = 1 } = request;
    const tokens = Math.ceil(packed.length / 4) + n * (most === "fit" ? 0 : most);
    const about = [lane[0], stream ? "s" : "-", ttlMs, "0.0.r", tokens, this.tenant, digest].join("|");
    const [reply] = await this.#redis.submit(this.tag, 1024, rid, deadlineMs, about, payload);
    const [outcome, ...rest] = reply.split("|");
    if (outcome === "full") {
      const [depth, limit, why, ms] = rest;
      throw Object.assign(new Error(`full: ${why}`), { depth, limit, why, retryAfterMs: Number(ms) });
    }
    if (outcome === "conflict") throw new Error("conflict: this key was used for another request");
    return { rid, outcome };
  }

  /** The events of a request, in order, once each. The last one is its end. One reader for each request. */
  async *stream(request, options = {}) {
    const rid = options.rid ?? this.rid(options.key);
    yield* this.#listening(rid, async () => {
      const { outcome } = await this.submit(request, { ...options, rid, stream: true });
      return outcome === "duplicate";
    });
  }

  /** The same of a request that was submitted before; behind a place (`epoch-seq`), where a reader has left. */
  async *attach(rid, after = "0-0") {
    yield* this.#listening(rid, async () => true, after.split("-").map(Number));
  }

  async *#listening(rid, submit, after = [0, 0]) {
    const listener = new Listener(this.silenceMs);
    const channel = `${this.tag}:c:${this.tenant}:${rid}`;
    this.#listeners.set(channel, listener);
    await this.#ear.subscribe(channel); // confirmed before anything is submitted
    try {
      if (await submit()) listener.push(null);
      yield* this.#inOrder(rid, listener, ...after);
    } finally {
      this.#listeners.delete(channel);
      await this.#ear.unsubscribe(channel);
    }
  }

  async *#inOrder(rid, listener, epoch, seq) {
    let last = seq ? "shown" : null;
    for (;;) {
      const heard = await listener.next();
      const frame = heard && parse(heard);
      if (frame && (frame.epoch < epoch || (frame.epoch === epoch && frame.seq <= seq))) continue;
      const isNext = frame && (frame.epoch === epoch ? frame.seq === seq + 1 : frame.seq === 0);
      let frames = frame?.event && (isNext || isComplete(frame, epoch, seq)) ? [frame] : await this.#log(rid, epoch, seq);
      if (frames.length === PAGE) listener.push(null); // there may be more
      if (!frames.length) {
        const record = await this.#record(rid);
        if (!record) throw new Error("Redis no longer knows this request");
        if (record.end) frames = [record.end];
      }
      for (const { epoch: its, seq: place, isEnd, event } of frames) {
        if (isEnd) {
          yield { ...event, complete: event.state !== "done" || (event.of === epoch && event.last_seq === seq) };
          return;
        }
        // Another worker has begun anew: what was shown is void.
        if (its > epoch && last && last !== "start") yield { type: "restart", reason: "the worker was lost" };
        [epoch, seq, last] = [its, place, event.type];
        yield { ...event, place: `${epoch}-${seq}` };
      }
    }
  }

  /** What the log has behind a place. */
  async #log(rid, epoch, seq) {
    const from = epoch ? `(${epoch}-${seq}` : "-";
    const entries = await this.#redis.xrangeBuffer(`${this.tag}:ev:${rid}`, from, "+", "COUNT", PAGE);
    return entries.map(([, [, frame]]) => parse(frame));
  }

  async #record(rid) {
    const record = await this.#redis.getBuffer(`${this.tag}:r:${rid}`);
    if (!record) return null;
    const line = record.indexOf("\n");
    const head = record.toString("latin1", 0, line < 0 ? undefined : line).split("|");
    if (head.at(-2) !== this.tenant) return null;
    if (!head[0].startsWith("E")) return { state: STATES[head[0][0]], end: null };
    return { state: STATES[head[0][1]], end: parse(record.subarray(line + 1)) };
  }

  /** Where a request stands; null if the tenant has none with this id, or its result has expired. */
  async status(rid) {
    return (await this.#record(rid))?.state ?? null;
  }

  /** Submit a request and wait for its end, which the record holds. */
  async run(request, options = {}) {
    let end;
    const rid = options.rid ?? this.rid(options.key);
    const submit = async () => (await this.submit(request, { ...options, rid })).outcome === "duplicate";
    for await (const event of this.#listening(rid, submit)) end = event;
    return end;
  }

  /** Cancel a request. Gives "cancelled", how it had ended before, or null if there is none. */
  async cancel(rid) {
    const error = { code: "cancelled", message: "the request was cancelled" };
    const end = Buffer.from(encode({ v: 1, type: "end", state: "cancelled", error }));
    const [reply] = await this.#redis.cancel(this.tag, this.tenant, end, rid);
    const [outcome, letter] = reply.split("|");
    return outcome === "ok" ? "cancelled" : (STATES[letter] ?? null);
  }
}

/** Whether an end says that nothing is missing before it. */
function isComplete({ isEnd, event }, epoch, seq) {
  return isEnd && (event.state !== "done" || (event.of === epoch && event.last_seq === seq));
}

/** Frames as they were heard; null for a silence, or where some may be missing. */
class Listener {
  #heard = [];
  #wake = () => {};

  constructor(silenceMs) {
    this.silenceMs = silenceMs;
  }

  push(frame) {
    this.#heard.push(frame);
    this.#wake();
  }

  async next() {
    if (!this.#heard.length) {
      await new Promise((resolve) => {
        const timer = setTimeout(resolve, this.silenceMs);
        this.#wake = () => (clearTimeout(timer), resolve());
      });
    }
    return this.#heard.shift() ?? null;
  }
}
