// Does what its standard input says, a JSON object a line, and says on standard output what came of it.
// Its arguments: URL, queue, a folder with submit.lua and cancel.lua.

import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { Producer } from "./producer.mjs";

const [url, queue, folder] = process.argv.slice(2);
const text = (name) => readFileSync(`${folder}/${name}.lua`, "utf8");
const producer = new Producer(url, queue, {
  scripts: { submit: text("submit"), cancel: text("cancel") },
  silenceMs: 60000, // what a test expects must come by itself
});
const say = (id, told) => process.stdout.write(`${JSON.stringify({ id, ...told })}\n`);

async function act({ id, name, args, steps }) {
  try {
    if (steps) {
      for await (const event of producer[name](...args)) say(id, { event });
      say(id, { over: true });
    } else {
      say(id, { result: (await producer[name](...args)) ?? null });
    }
  } catch (error) {
    say(id, { error: error.message, details: { ...error } });
  }
}

const acting = [];
for await (const line of createInterface({ input: process.stdin })) acting.push(act(JSON.parse(line)));
await Promise.all(acting);
await producer.close();
