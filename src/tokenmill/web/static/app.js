// The run, its events, and the stream that all of the page is renewed by.

import { addPoints, begin as beginCharts } from "/charts.js";
import { $, count, duration, el, moment, options, percent } from "/dom.js";
import { renew as renewLogs, pause as pauseLogs, resume as resumeLogs } from "/logs.js";
import { renew as renewRecords } from "/records.js";
import { addChanges, beginTimeline, drawTimeline, showNodes, showServers } from "/servers.js";

const EVENTS = 200; // as the server keeps
const GOOD = ["generating", "done", "up"];
const BAD = ["failed", "killed"];
let stream = null;
let last = null;

function connect() {
  stream = new EventSource("/api/stream");
  const on = (name, then) => stream.addEventListener(name, (event) => then(JSON.parse(event.data)));
  on("whole", (whole) => {
    beginCharts(whole.columns);
    beginTimeline(whole.timeline, whole.gaps);
    $("happened").replaceChildren();
    addEvents(whole.events);
    show(whole);
  });
  on("status", show);
  on("points", addPoints);
  on("events", (events) => {
    addEvents(events);
    addChanges(events);
  });
  stream.onerror = () => {
    $("fresh").textContent = "not connected; trying again";
    // A browser gives up on an answer that is no stream, such as "too many look already".
    if (stream.readyState === EventSource.CLOSED) setTimeout(() => document.hidden || connect(), 5000);
  };
}

// A page that nobody sees follows nothing: browsers allow six streams to one address.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    stream.close();
    pauseLogs();
  } else {
    connect();
    resumeLogs();
  }
});

function show(now) {
  last = now;
  const status = now.status;
  if (!status) return;
  const counts = status.prompts;
  const done = counts.total - counts.pending;
  $("run").textContent = status.run;
  $("state").textContent = status.state;
  $("state").className = `pill ${GOOD.includes(status.state) ? "good" : BAD.includes(status.state) ? "bad" : ""}`;
  const fresh = now.live ? "live" : status.updated ? `ended ${moment(status.updated)}` : "nothing is known of it";
  if ($("fresh").textContent !== fresh) $("fresh").textContent = fresh;
  document.title = counts.total ? `${percent(done / counts.total)} ${status.run}` : status.run;
  $("bar").max = counts.total || 1;
  $("bar").value = done;
  $("done").textContent = `${count(done)} of ${count(counts.total)} have a record`;
  for (const name of ["accepted", "rejected", "failed", "pending"]) $(name).textContent = count(counts[name]);
  $("tokens_per_s").textContent = count(status.tokens_per_s);
  $("mean").textContent = status.seconds ? count(status.tokens / status.seconds) : "–";
  $("tokens").textContent = count(status.tokens);
  $("slots_busy").textContent = status.slots_busy === null ? "–" : percent(status.slots_busy);
  $("eta").textContent = now.words.left || "–";
  $("peak").hidden = !now.words.peak;
  $("peak").textContent = now.words.peak;
  $("step").hidden = !now.words.step;
  $("step").textContent = now.words.step;
  age("written", status.written, now);
  age("copied", status.copied, now);
  $("message").hidden = !status.message;
  $("message").textContent = status.message;
  chips("gate", now.words.gate.map(([text, near]) => el("li", { class: near ? "warn" : "", text })));
  const labels = Object.entries(status.labels).sort((a, b) => b[1] - a[1]);
  chips("labels", labels.map(([name, n]) => el("li", { text: `${name} ${count(n)} (${percent(done ? n / done : 0)})` })));
  $("findings").replaceChildren(
    ...status.findings.map((found) =>
      el("p", { class: "notice", text: `server ${found.server}: ${found.text}${found.fix ? `\nfix: ${found.fix}` : ""}` })),
  );
  showNodes(status.nodes, now.words);
  showServers(status.servers, now.words.servers);
  drawTimeline(now.live ? now.now : status.updated);
  options($("label"), now.catalog.labels, "any");
  options($("log"), now.logs, "none");
  renewRecords(now);
  renewLogs();
}

function chips(id, items) {
  $(id).replaceChildren(...(items.length ? items : [el("li", { text: "none" })]));
}

function age(id, then, now) {
  $(id).textContent = then ? (now.live ? `${duration(Math.max(now.now - then, 0))} ago` : moment(then)) : "–";
}

function addEvents(events) {
  const rows = events.map((event) => {
    const where = event.server ? `server ${event.server}: ` : event.node ? `node ${event.node}: ` : "";
    const below = [...(event.lines || []), ...(event.fix ? [`fix: ${event.fix}`] : [])].map((line) => `\n    ${line}`);
    const level = { error: "error", warn: "warned" }[event.level] || "";
    const word = level ? `${event.level}: ` : "";
    return el("li", { class: level }, el("time", { text: moment(event.t) }), `${word}${where}${event.text}${below.join("")}`);
  });
  $("happened").prepend(...rows.reverse());
  while ($("happened").childElementCount > EVENTS) $("happened").lastElementChild.remove();
}

connect();
