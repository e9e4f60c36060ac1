"use strict";
// Everything that comes from the server is shown as text, never as markup.
const LOOK_MS = 2000;
const get = (id) => document.getElementById(id);
const element = (name, text = "", kind = "") => Object.assign(document.createElement(name), { textContent: text, className: kind });
let asking = null;
let looking = 0;

function headers(more = {}) {
  const key = sessionStorage.getItem("key");
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

function say(text, bad = false) {
  get("state").textContent = text;
  get("state").className = bad ? "bad" : "";
}

async function refusal(response) {
  const body = await response.json().catch(() => ({}));
  if (response.status === 401) get("key-form").hidden = false;
  return new Error(body.error?.message ?? `${response.status} ${response.statusText}`);
}

// --- what the fleet does

function waited(ms) {
  return ms ? (ms < 1000 ? `${ms} ms` : `${(ms / 1000).toFixed(1)} s`) : "–";
}

function bar(queue) {
  const shown = element("div", "", "bar");
  shown.title = `${queue.running} running, ${queue.queued} queued of ${queue.limit}`;
  for (const part of [queue.running, queue.queued]) {
    const piece = element("i");
    piece.style.width = `${Math.min(100, (100 * part) / Math.max(1, queue.limit))}%`;
    shown.append(piece);
  }
  return shown;
}

function fill(table, rows) {
  get(table).tBodies[0].replaceChildren(...rows);
  get(table).hidden = !rows.length;
  get(table).parentElement.querySelector(".none").hidden = Boolean(rows.length);
}

function cells(...values) {
  const row = element("tr");
  for (const value of values) {
    const cell = element("td", value instanceof Node ? "" : value, typeof value === "number" ? "number" : "");
    if (value instanceof Node) cell.append(value);
    row.append(cell);
  }
  return row;
}

function show(queues) {
  fill("queues", queues.map((queue) => {
    const row = cells(queue.queue, bar(queue), queue.queued, queue.running, queue.limit, waited(queue.oldest_wait_ms), queue.dead);
    row.children[5].className = "number";
    if (queue.dead) row.children[6].className = "number bad";
    return row;
  }));
  fill("workers", queues.flatMap((queue) => queue.workers.map((worker) => cells(
    worker.worker, queue.queue, worker.model, worker.tasks.join(", "), [worker.device, worker.precision].filter(Boolean).join(" "),
    element("span", worker.state, worker.state === "ready" ? "good" : "soft"), worker.capacity,
  ))));
  const names = [...new Set(queues.flatMap((queue) => queue.workers
    .filter((worker) => worker.tasks.includes("generate")).map((worker) => worker.model)))];
  const model = get("model");
  if (names.join("\n") !== [...model.options].map((option) => option.value).join("\n")) {
    const chosen = model.value;
    model.replaceChildren(...names.map((name) => new Option(name, name)));
    if (names.includes(chosen)) model.value = chosen;
  }
}

async function look() {
  clearTimeout(looking);
  if (!document.hidden) {
    try {
      const response = await fetch("v1/fleet", { headers: headers(), cache: "no-store" });
      if (!response.ok) throw await refusal(response);
      show((await response.json()).queues);
      say(`as of ${new Date().toLocaleTimeString()}`);
    } catch (error) {
      say(error instanceof TypeError ? "the gateway does not answer" : error.message, true);
    }
  }
  looking = setTimeout(look, LOOK_MS);
}

// --- a prompt

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

async function ask() {
  const began = performance.now();
  let first = null;
  const answer = get("answer");
  const figures = get("figures");
  answer.replaceChildren();
  answer.className = "";
  figures.textContent = "waiting…";
  asking = new AbortController();
  get("send").disabled = !(get("stop").disabled = false);
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      signal: asking.signal,
      headers: headers({ "Content-Type": "application/json" }),
      body: JSON.stringify({
        model: get("model").value,
        messages: [{ role: "user", content: get("prompt").value }],
        max_completion_tokens: Number(get("tokens").value),
        temperature: Number(get("temperature").value),
        stream: true,
        stream_options: { include_usage: true },
      }),
    });
    if (!response.ok) throw await refusal(response);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const text = event.choices?.[0]?.delta?.content;
      if (text) {
        first ??= performance.now();
        answer.append(text);
      }
      if (event.usage) {
        const seconds = (performance.now() - began) / 1000;
        const rate = event.usage.completion_tokens / seconds;
        figures.textContent = `${event.usage.completion_tokens} tokens, first after ${waited(Math.round((first ?? performance.now()) - began))}, ${rate.toFixed(1)} tokens/s`;
      }
    }
  } catch (error) {
    if (error.name === "AbortError") {
      figures.textContent = "stopped";
    } else {
      figures.textContent = "";
      answer.className = "bad";
      answer.append(error.message);
    }
  } finally {
    asking = null;
    get("send").disabled = !(get("stop").disabled = true);
  }
}

get("ask").addEventListener("submit", (event) => { event.preventDefault(); if (!asking) ask(); });
get("stop").addEventListener("click", () => asking?.abort());
get("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", get("key").value.trim());
  get("key-form").hidden = true;
  look();
});
look();
