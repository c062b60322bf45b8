// Builds elements. Texts are only ever set as text: nothing that comes from a run is read as HTML.

export const $ = (id) => document.getElementById(id);

export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") made.textContent = value;
    else if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

export const count = (value) => value.toLocaleString("en-US", { maximumFractionDigits: 0 });
export const percent = (share) => `${(100 * share).toFixed(1)}%`;

const clock = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const day = new Intl.DateTimeFormat([], { month: "2-digit", day: "2-digit" });
export function moment(seconds) {
  const date = new Date(seconds * 1000);
  const today = day.format(new Date()) === day.format(date);
  return today ? clock.format(date) : `${day.format(date)} ${clock.format(date)}`;
}

const minute = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", hour12: false });

// A tick of a time axis whose ticks are so many seconds apart.
export function onAxis(seconds, apart) {
  const date = new Date(seconds * 1000);
  return apart < 60 ? clock.format(date) : apart < 86400 ? minute.format(date) : day.format(date);
}

// As the terminal says it: 42 s, 5 min, 3 h 20 min, 4 d 2 h.
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 120) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${String(minutes % 60).padStart(2, "0")} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

// Options of a select; what was chosen stays chosen.
export function options(select, values, first) {
  const wanted = JSON.stringify(values);
  if (select.dataset.values === wanted) return;
  select.dataset.values = wanted;
  const chosen = select.value;
  select.replaceChildren(el("option", { value: "", text: first }), ...values.map((v) => el("option", { value: v, text: v })));
  select.value = values.map(String).includes(chosen) ? chosen : "";
}
