// Perfetto's own trace processor, in node: loads a trace and answers SQL.
//
//     node trace_processor.js FOLDER TRACE QUERIES     (FOLDER: where engine_bundle.js and the .wasm are; QUERIES: a JSON list)
//
// The bundle is a web worker that is spoken to in protobuf; what is needed of that is written out by hand. Prints a JSON list with
// the rows of each query, as objects.
"use strict";
const fs = require("fs"), path = require("path"), vm = require("vm");
const [folder, trace, queries] = [process.argv[2], process.argv[3], JSON.parse(process.argv[4])];
const APPEND = 1, FINALIZE = 2, QUERY = 3;

globalThis.self = globalThis;
globalThis.WorkerGlobalScope = class {};
globalThis.importScripts = () => {};
globalThis.location = { href: "http://perfetto/" };
globalThis.XMLHttpRequest = class {
  open(_, name) { this.name = path.basename(String(name)); }
  send() { this.response = new Uint8Array(fs.readFileSync(path.join(folder, this.name))); }
};
process.on("uncaughtException", (error) => { process.stderr.write(String(error.message || error)); process.exit(1); });
console.log = console.warn = () => {};

function varint(value) {
  const bytes = [];
  for (let left = BigInt(value); ; left >>= 7n) {
    if (left < 128n) return Buffer.from([...bytes, Number(left)]);
    bytes.push(Number(left & 127n) | 128);
  }
}
const number = (field, value) => Buffer.concat([varint(field << 3), varint(value)]);
const bytes = (field, value) => Buffer.concat([varint((field << 3) | 2), varint(value.length), value]);

function* fields(data) {
  let at = 0;
  const take = () => { let value = 0n; for (let shift = 0n; ; shift += 7n) { const byte = data[at++]; value |= BigInt(byte & 127) << shift; if (byte < 128) return value; } };
  while (at < data.length) {
    const tag = Number(take()), kind = tag & 7;
    if (kind === 0) yield [tag >> 3, take()];
    else if (kind === 1) { yield [tag >> 3, data.readDoubleLE(at)]; at += 8; }
    else if (kind === 2) { const length = Number(take()); yield [tag >> 3, data.subarray(at, at + length)]; at += length; }
    else throw new Error(`wire type ${kind}`);
  }
}
function packed(data) {
  const found = [];
  let value = 0n, shift = 0n;
  for (const byte of data) {
    value |= BigInt(byte & 127) << shift; shift += 7n;
    if (byte < 128) { found.push(Number(BigInt.asIntN(64, value))); value = 0n; shift = 0n; }
  }
  return found;
}

function rowsOf(result, into) {
  for (const [field, value] of fields(result)) {
    if (field === 1) into.names.push(value.toString());
    else if (field === 2) throw new Error(value.toString());
    else if (field === 3) {
      let cells = [], ints = [], doubles = [], texts = [];
      for (const [part, data] of fields(value)) {
        if (part === 1) cells = packed(data);
        else if (part === 2) ints = packed(data);
        else if (part === 3) for (let at = 0; at < data.length; at += 8) doubles.push(data.readDoubleLE(at));
        else if (part === 5) texts = data.toString().split("\0");
        else if (part === 6) into.isOver = Number(data) !== 0;
      }
      for (const cell of cells) into.cells.push(cell === 2 ? ints.shift() : cell === 3 ? doubles.shift() : cell === 4 ? texts.shift() : null);
    }
  }
}

const replies = [];
const port = { onmessage: null, postMessage(data) { replies.push(Buffer.from(data)); } };
let sequence = 0;
function ask(kind, more) {
  const message = Buffer.concat([number(1, ++sequence), number(2, kind), more || Buffer.alloc(0)]);
  port.onmessage({ data: new Uint8Array(bytes(1, message)) });
  const found = Buffer.concat(replies.splice(0));
  return [...fields(found)].map(([, message]) => [...fields(message)]);
}

// It is built for browsers, and stops where it finds a `process`.
vm.runInThisContext(`(function (process) {${fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8")}\n})`)();
globalThis.onmessage({ data: port });
(async () => {
  for (let tries = 0; ; tries++) {  // ready when it answers
    await new Promise((done) => setTimeout(done, 50));
    try { ask(APPEND, bytes(101, fs.readFileSync(trace))); break; } catch (error) { if (tries > 200) throw error; replies.splice(0); }
  }
  for (const message of ask(FINALIZE)) for (const [field, value] of message) if (field === 5) throw new Error(value.toString());
  const answers = queries.map((query) => {
    const into = { names: [], cells: [] };
    for (const message of ask(QUERY, bytes(103, bytes(1, Buffer.from(query))))) for (const [field, value] of message) if (field === 203) rowsOf(value, into);
    const rows = [];
    for (let at = 0; at < into.cells.length; at += into.names.length) rows.push(Object.fromEntries(into.names.map((name, i) => [name, into.cells[at + i]])));
    return rows;
  });
  process.stdout.write(JSON.stringify(answers));
  process.exit(0);
})().catch((error) => { process.stderr.write(String(error.stack || error)); process.exit(1); });
