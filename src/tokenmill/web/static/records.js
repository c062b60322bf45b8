// Single completions: the newest, the worst, those of a key. Texts of a model are untrusted, and stay texts.

import { $, count, duration, el, moment } from "/dom.js";

const STYLE = { accepted: "good", rejected: "bad", failed: "bad" };
const AGAIN_MS = 5000; // between two lists of a run that goes on: time to read
let order = "newest";
let shownFor = "";
let shownAt = -AGAIN_MS;
let later = 0;
let asked = 0;
let reading = false; // somebody has opened a record: it must not go away beneath the eyes

export function renew(now) {
  const missing = now.catalog.left ? `; ${now.catalog.left} files are still to be read for Worst and for keys` : "";
  const trouble = now.catalog.trouble ? `; ${now.catalog.trouble}` : "";
  $("told").textContent = `${count(now.catalog.rows)} records can be found${missing}${trouble}`;
  const state = `${order} ${$("label").value} ${now.catalog.rows} ${now.status.written}`;
  if (order === "key" || reading || state === shownFor) return;
  clearTimeout(later);
  const wait = shownAt + AGAIN_MS - performance.now();
  if (wait > 0) {
    later = setTimeout(() => renew(now), wait);
    return;
  }
  shownFor = state;
  load();
}

async function load() {
  shownAt = performance.now();
  $("records").setAttribute("aria-busy", "true");
  const query = new URLSearchParams({ order, label: order === "worst" ? $("label").value : "", key: $("key").value });
  const number = (asked += 1);
  let found = null;
  try {
    const answer = await fetch(`/api/records?${query}`);
    found = answer.ok ? await answer.json() : await answer.text();
  } catch {
    found = "not connected";
  }
  if (number !== asked) return; // somebody asked for others meanwhile
  reading = false;
  $("records").setAttribute("aria-busy", "false");
  const none = order === "key" ? "No record has this key, whole and as it is written." : "No record yet.";
  if (typeof found === "string") $("records").replaceChildren(el("p", { class: "notice", text: found }));
  else if (!found.length) $("records").replaceChildren(el("p", { class: "quiet", text: none }));
  else $("records").replaceChildren(...found.map((record) => card(record)));
}

function choose(next) {
  order = next;
  $("newest").setAttribute("aria-pressed", String(order === "newest"));
  $("worst").setAttribute("aria-pressed", String(order === "worst"));
  load();
}
$("newest").addEventListener("click", () => choose("newest"));
$("worst").addEventListener("click", () => choose("worst"));
$("label").addEventListener("change", () => choose("worst"));
$("search").addEventListener("submit", (event) => {
  event.preventDefault();
  choose("key");
});

function card(record, whole = false) {
  const facts = [
    `sample ${record.sample}`, record.turn ? `turn ${record.turn}` : "", record.server ? `server ${record.server}` : "",
    record.finish_reason, `${count(record.prompt_tokens)} + ${count(record.output_tokens)} tokens`,
    record.reasoning_tokens ? `${count(record.reasoning_tokens)} of thought` : "", record.repetition ? `repetition ${record.repetition}` : "",
    record.attempt > 1 ? `attempt ${record.attempt}` : "", record.started ? `${moment(record.started)}, ${duration(record.seconds)}` : "",
  ];
  const made = el("article", { class: whole ? "whole" : "" },
    el("h3", {}, el("span", { text: record.name }),
      el("span", { class: `badge ${STYLE[record.verdict] || ""}`, text: record.verdict }),
      ...record.labels.map((label) => el("span", { class: "badge warn", text: label })),
      record.superseded ? el("span", { class: "badge", text: "superseded by a newer one" }) : null),
    el("p", { class: "quiet", text: facts.filter(Boolean).join(" · ") }),
    record.error ? el("p", { class: "notice", text: record.error }) : null,
    ...record.messages.flatMap(([role, text]) => part(`prompt: ${role}`, text)),
    ...part("thought", record.thought, "thought"), ...part("answer", record.answer, "answer"),
    ...(whole ? part("whole output", record.raw) : []));
  if (!whole) made.append(el("button", { type: "button", text: "Whole record", onclick: () => open(record, made) }));
  return made;
}

const part = (title, text, kind = "") => text
  ? [el("h4", { text: title }), el("div", { class: `text ${kind}`, tabindex: "0", role: "group", "aria-label": title, text })]
  : [];

async function open(record, place) {
  reading = true;
  const query = new URLSearchParams({ key: record.key, sample: record.sample, turn: record.turn });
  const answer = await fetch(`/api/record?${query}`).catch(() => null);
  const found = answer?.ok ? await answer.json() : [];
  const same = found.find((one) => one.attempt === record.attempt);
  if (!same) {
    place.append(el("p", { class: "notice", text: "It cannot be found yet: its file is still to be read." }));
    return;
  }
  const made = card(same, true);
  place.replaceWith(made);
  made.setAttribute("tabindex", "-1");
  made.focus();
}
