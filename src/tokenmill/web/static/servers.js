// The nodes' table where there are several, the servers' table, and the timeline of their phases.

import { $, count, el, moment } from "/dom.js";

const KNOWN = 500; // changes a server, as the server keeps
const STYLE = { ready: "good", failed: "bad", quarantined: "bad", backoff: "warn", suspect: "warn" };
const NODE_STYLE = { ready: "good", ended: "good", failed: "bad", lost: "bad", gone: "bad", backoff: "warn", alone: "warn" };
let changes = {};
let gaps = [];

// `words.nodes` are what the terminal says beside each node's numbers, `words.doctors` what their doctors found.
export function showNodes(nodes, words) {
  $("nodes").hidden = $("to-nodes").hidden = nodes.length === 0;
  $("node-rows").replaceChildren(...nodes.map((node, at) => {
    const cell = (text) => el("td", { text });
    return el("tr", {},
      el("th", { scope: "row", text: node.node, title: node.at }),
      el("td", {}, el("span", { class: `badge ${NODE_STYLE[node.state] || ""}`, text: node.state })),
      cell(node.servers ? `${node.ready}/${node.servers}` : ""),
      cell(node.capacity ? `${node.in_flight}/${node.capacity}` : ""),
      cell(node.capacity ? count(node.tokens_per_s) : ""),
      cell(node.records ? count(node.records) : ""),
      cell(words.nodes[at]));
  }));
  $("node-findings").hidden = words.doctors.length === 0;
  $("node-found").replaceChildren(...words.doctors.map(([text, fix]) =>
    el("li", { text: fix ? `${text}\nfix: ${fix}` : text })));
}

// `words` are each server's name and where its start is, as the terminal says them.
export function showServers(servers, words) {
  $("no-servers").hidden = servers.length > 0;
  $("table").hidden = servers.length === 0;
  $("rows").replaceChildren(...servers.map((server, at) => {
    const card = ["", "none"].includes(server.gpu) ? "" : ` (GPU ${server.gpu})`;
    const [name, start] = words[at];
    const cell = (text) => el("td", { text });
    return el("tr", {},
      el("th", { scope: "row", text: name + card }),
      el("td", {}, el("span", { class: `badge ${STYLE[server.state] || ""}`, text: server.state })),
      cell(start),
      cell(server.capacity ? `${server.in_flight}/${server.capacity}` : ""),
      cell(server.capacity ? count(server.tokens_per_s) : ""),
      cell(server.accept_length ? server.accept_length.toFixed(2) : ""),
      cell(server.restarts ? String(server.restarts) : ""),
      cell(server.last_error || server.doing || server.last_problem));
  }));
}

export function beginTimeline(known, empty) {
  changes = known;
  gaps = empty;
}

export function addChanges(events) {
  for (const event of events.filter((one) => one.kind === "state")) {
    const state = event.text.split(" → ")[1];
    if (state) (changes[event.server] ||= []).push([event.t, state]);
    if (changes[event.server]?.length > KNOWN) changes[event.server].shift();
  }
}

// From the first change known to `end`, a Unix time.
export function drawTimeline(end) {
  const names = Object.keys(changes).sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const begin = Math.min(...names.map((name) => changes[name][0][0]));
  const wide = Math.max(end - begin, 1);
  const met = new Set();
  const span = (state, from, to) => {
    const made = el("i", { class: `s-${state}`, title: `${state} ${moment(from)} – ${moment(to)}` });
    made.style.left = `${(100 * (from - begin)) / wide}%`;
    made.style.width = `${(100 * Math.max(to - from, 0)) / wide}%`;
    met.add(state);
    return made;
  };
  $("timeline").replaceChildren(...names.map((name) => {
    const own = changes[name];
    const until = (at) => Math.min(at + 1 < own.length ? own[at + 1][0] : end, end);
    const spans = own.map(([from, state], at) => span(state, from, Math.max(until(at), from)));
    const empty = gaps.filter(([from]) => from >= begin).map(([from, to]) => span("nobody", from, to));
    const [since, state] = own.at(-1);
    const told = `server ${name}: ${own.length} phases since ${moment(own[0][0])}, ${state} since ${moment(since)}`;
    return el("div", { class: "track" }, el("span", { text: name }),
      el("div", { class: "spans", role: "img", "aria-label": told }, ...spans, ...empty));
  }), ...(names.length ? [el("p", { class: "quiet", text: `${moment(begin)} – ${moment(end)}` })] : []));
  $("states").replaceChildren(...[...met].map((state) => {
    const word = state === "nobody" ? "tokenmill was not running" : state;
    return el("li", {}, el("span", { class: `swatch s-${state}` }), word);
  }));
}
