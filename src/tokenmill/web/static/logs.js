// The end of one server's log, and what comes.

import { $ } from "/dom.js";

const LINES = 300; // as the server keeps
let stream = null;
let lines = [];

function follow() {
  pause();
  lines = [];
  $("lines").textContent = "";
  const server = $("log").value;
  if (server === "") return;
  stream = new EventSource(`/api/log?server=${encodeURIComponent(server)}`);
  stream.addEventListener("begin", (event) => {
    lines = [];
    add(JSON.parse(event.data));
  });
  stream.addEventListener("lines", (event) => add(JSON.parse(event.data)));
  stream.onerror = () => {
    if (stream?.readyState === EventSource.CLOSED) $("lines").textContent = `the log of server ${server} cannot be shown`;
  };
}

function add(more) {
  const place = $("lines");
  const atEnd = place.scrollHeight - place.scrollTop - place.clientHeight < 40;
  lines = [...lines, ...more].slice(-LINES);
  place.textContent = lines.join("\n");
  if (atEnd) place.scrollTop = place.scrollHeight;
}

export function pause() {
  stream?.close();
  stream = null;
}

export const resume = () => $("log").value !== "" && follow();

// A choice that went away, since its log did, ends what was followed.
export const renew = () => stream && $("log").value === "" && follow();

$("log").addEventListener("change", follow);
