// The page at /: it reads /v1/blocks/stream and shows blocks, requests and rates. The chat is in chat.js.

import { BlockMap, fillRows } from "./map.js";
import { Chat } from "./chat.js";

const byId = (id) => document.getElementById(id);
const ORDER = ["decode", "prefill", "swapped", "waiting", "idle"];
const MOST_ROWS = 200;
const SECONDS = 300;

let key = ""; // of the API, in memory only
const requests = new Map(); // by key
let rates = []; // rows of the last five minutes
let names = []; // of the columns of rates

const nameOf = (owner) => (requests.has(owner) ? nameOfRow(requests.get(owner)) : "other");
const map = new BlockMap(byId("grid"), byId("blocks"), byId("detail"), byId("legend"), nameOf);

export async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  if (options.body) headers["content-type"] = "application/json";
  const answer = await fetch(path, { ...options, headers, cache: "no-store" });
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => null);
  const error = new Error(body?.error?.message ?? `HTTP ${answer.status}`);
  error.status = answer.status;
  throw error;
}

// Yield the events of a stream as [name, data].
export async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    let end;
    while ((end = text.indexOf("\n\n")) >= 0) {
      let name = "message";
      let data = "";
      for (const line of text.slice(0, end).split("\n")) {
        if (line.startsWith("event: ")) name = line.slice(7);
        else if (line.startsWith("data: ")) data += line.slice(6);
      }
      text = text.slice(end + 2);
      if (data) yield [name, data];
    }
  }
}

// ---- the stream of blocks ----

const handlers = {
  header(data) {
    byId("model").textContent = data.model;
    names = data.rates;
    rates = [];
    const size = (data.blocks * data.block_bytes) / 2 ** 20;
    const parts = [`${data.blocks} blocks of ${data.block_size} tokens`, `${size.toFixed(1)} MiB`];
    if (data.groups > 1) parts.push(`${data.groups} groups of layers`);
    if (data.swap_blocks) parts.push(`${data.swap_blocks} more in host memory, below the others`);
    byId("pool").textContent = parts.join(", ");
    map.start(data);
  },
  snapshot: (data) => map.update(data, true),
  delta: (data) => map.update(data, false),
  requests(data) {
    if (data.all) requests.clear();
    for (const gone of data.gone) requests.delete(gone);
    for (const row of data.rows) requests.set(row.key, row);
    showRequests();
    map.refresh();
  },
  rates(data) {
    rates = [...rates, ...data.rows].slice(-SECONDS);
    showRates();
  },
};

const chat = new Chat(call, eventsOf);
let aborter = null;
let wake = () => {};

async function readOnce() {
  aborter = new AbortController();
  const answer = await call("/v1/blocks/stream", { signal: aborter.signal });
  byId("key-form").hidden = true;
  setStatus("live", "Live");
  for await (const [name, data] of eventsOf(answer)) handlers[name]?.(JSON.parse(data));
}

async function follow() {
  let wait = 0.5;
  for (;;) {
    const begin = performance.now();
    let note = "the server ended the stream";
    try {
      await readOnce();
    } catch (error) {
      note = error.status ? error.message : "the server does not answer";
      if (error.status === 401) byId("key-form").hidden = false;
    }
    if (performance.now() - begin > 5000) wait = 0.5;
    if (document.hidden) setStatus("idle", "Paused while the page is hidden");
    else setStatus("lost", `Not connected: ${note}. Trying again.`);
    await new Promise((resolve) => {
      wake = resolve;
      if (!document.hidden && byId("key-form").hidden) setTimeout(resolve, 1000 * wait);
    });
    wait = Math.min(2 * wait, 8);
  }
}

function setStatus(state, text) {
  const status = byId("status");
  status.dataset.state = state;
  if (status.textContent !== text) status.textContent = text;
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) aborter?.abort();
  else wake();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  byId("key").value = "";
  byId("key-form").hidden = true;
  wake();
});

// ---- requests ----

// Sessions have long ids, so that they cannot be guessed.
function nameOfRow(row) {
  if (!row.id.startsWith("sess_")) return row.id;
  return chat.nameOf(row.id) ?? `session ${row.id.slice(5, 11)}`;
}

function showRequests() {
  const rows = [...requests.values()];
  rows.sort((a, b) => ORDER.indexOf(a.state) - ORDER.indexOf(b.state) || a.key - b.key);
  const lines = rows.slice(0, MOST_ROWS).map((row) => {
    const state = row.state === "idle" ? "idle session" : row.state;
    return [nameOfRow(row), row.tenant, state, row.tokens, row.cached, row.blocks];
  });
  fillRows(byId("requests"), lines);
  const left = rows.length - MOST_ROWS;
  byId("no-requests").hidden = rows.length > 0 && left <= 0;
  byId("no-requests").textContent = left > 0 ? `${left} more` : "No request holds blocks or waits.";
}

// ---- rates ----

const percent = (value) => `${Math.round(100 * value)} %`;
const seconds = (value) => (value < 1 ? `${(1000 * value).toPrecision(3)} ms` : `${value.toPrecision(3)} s`);
const CHARTS = [
  ["Prefix hit rate", percent, ["hit_rate"], 1],
  ["Time to first token", seconds, ["first"]],
  ["Between tokens, p50 / p99", seconds, ["between_50", "between_99"]],
  ["Tokens/s", (value) => value.toFixed(value < 10 ? 1 : 0), ["tokens"]],
  ["Waiting requests", (value) => String(value), ["waiting"]],
].map(([title, format, columns, top]) => new Chart(title, format, columns, top));

function Chart(title, format, columns, top) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", `0 0 ${SECONDS} 100`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  const paths = columns.map((_, number) => {
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    if (number) path.setAttribute("class", "second");
    svg.append(path);
    return path;
  });
  const caption = document.createElement("figcaption");
  const number = document.createElement("b");
  const name = document.createElement("span");
  name.textContent = title;
  caption.append(name, number);
  const figure = document.createElement("figure");
  figure.append(caption, svg);
  byId("charts").append(figure);

  this.show = () => {
    const series = columns.map((column) => rates.map((row) => row[names.indexOf(column)]));
    const known = series.flat().filter((value) => value !== null);
    const most = top ?? Math.max(1e-9, ...known);
    series.forEach((values, index) => paths[index].setAttribute("d", line(values, most)));
    const last = series.map((values) => values.filter((value) => value !== null).at(-1));
    number.textContent = last.map((value) => (value === undefined ? "–" : format(value))).join(" / ");
    const highest = known.length ? `, highest ${format(Math.max(...known))}` : "";
    svg.setAttribute("aria-label", `${title}: last ${number.textContent}${highest}`);
  };
}

// Return the line of a chart. Seconds without a value are skipped; more than ten of them interrupt the line.
function line(values, most) {
  const parts = [];
  let last = -Infinity;
  values.forEach((value, index) => {
    if (value === null) return;
    const x = SECONDS - values.length + index;
    parts.push(`${index - last > 10 ? "M" : "L"}${x} ${(97 - (94 * value) / most).toFixed(1)}h1`);
    last = index;
  });
  return parts.join("");
}

function showRates() {
  for (const chart of CHARTS) chart.show();
}

// ---- the table, and the start ----

byId("table-view").addEventListener("toggle", () => map.fillTable(byId("ranges")));
setInterval(() => {
  if (byId("table-view").open) map.fillTable(byId("ranges"));
}, 1000);

window.pyvelo = { map, requests, chat }; // for tests
showRates();
follow();
