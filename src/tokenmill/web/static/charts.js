// Charts over time, by uPlot. Columns come as web/charts.py makes them; a point that is not final makes way for the next.

/* global uPlot */
import { $, count, el, moment, onAxis, percent } from "/dom.js";

const MOST = 2000; // points, then every second one goes
const HEIGHT = 190;
const COLOURS = 8;
const two = (value) => value.toFixed(2);
const PLOTS = [
  { title: "Tokens a second", whole: "all", key: "tokens_per_s", tell: count },
  { title: "Slots busy", whole: "all", key: "slots_busy", tell: percent },
  { title: "Accept length", whole: "all", key: "accept_length", tell: two },
  { title: "Rejected, and labels: new a minute", whole: "rejected", key: "rejected", labels: true, tell: two },
];

const short = (value, plot) => plot.tell === percent ? `${Math.round(100 * value)}%`
  : value >= 1000 ? `${value / 1000}k` : String(Math.round(100 * value) / 100);

let columns = null;
let unfinished = 0;
const drawn = [];

export function begin(whole) {
  columns = whole;
  unfinished = 0;
  draw();
}

export function addPoints({ final, skip, columns: more }) {
  if (!columns) return;
  for (; unfinished; unfinished -= 1) each(columns, (column) => column.pop());
  const known = columns.t.length;
  const added = more.t.length - skip;
  if (added <= 0) return;
  if (known && more.t[skip] <= columns.t[known - 1]) return; // it was in the beginning already
  for (const group of ["labels", "servers"]) {
    for (const name of Object.keys(more[group])) columns[group][name] ||= empty(more[group][name], known);
  }
  pour(columns, more, skip, added);
  if (!final) unfinished = added;
  else if (columns.t.length > MOST) each(columns, (column) => column.splice(0, column.length, ...column.filter((_, at) => at % 2)));
  draw();
}

const empty = (like, length) => Array.isArray(like)
  ? new Array(length).fill(null)
  : Object.fromEntries(Object.entries(like).map(([name, column]) => [name, empty(column, length)]));

function each(tree, then) {
  for (const branch of Object.values(tree)) Array.isArray(branch) ? then(branch) : each(branch, then);
}

// Every column grows by as many points; a server or a label that is not told of gets none.
function pour(into, from, skip, added) {
  for (const [name, branch] of Object.entries(into)) {
    const more = from?.[name];
    if (Array.isArray(branch)) branch.push(...(more ? more.slice(skip) : new Array(added).fill(null)));
    else pour(branch, more, skip, added);
  }
}

function linesOf(plot) {
  const lines = [[plot.whole, columns[plot.key]]];
  if (plot.labels) lines.push(...Object.entries(columns.labels));
  else if (Object.keys(columns.servers).length > 1) {
    lines.push(...Object.entries(columns.servers).map(([name, server]) => [`server ${name}`, server[plot.key]]));
  }
  return lines;
}

function draw() {
  PLOTS.forEach((plot, at) => {
    const lines = linesOf(plot);
    const names = JSON.stringify(lines.map(([name]) => name));
    const data = [columns.t, ...lines.map(([, column]) => column)];
    if (drawn[at]?.names === names) {
      drawn[at].chart.setData(data);
    } else {
      drawn[at]?.close();
      drawn[at] = make(plot, lines, data, names, drawn[at]?.figure);
      if (!drawn[at].figure.isConnected) $("plots").append(drawn[at].figure);
    }
    drawn[at].tell(null);
    drawn[at].figure.hidden = lines.every(([, column]) => column.every((value) => value === null));
  });
}

function make(plot, lines, data, names, old) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const stroke = (at) => colour(at === 0 ? "--c0" : `--c${1 + ((at - 1) % COLOURS)}`);
  const place = el("div", { tabindex: "0", role: "img", "aria-label": plot.title });
  const readout = el("p", { class: "readout" });
  const legend = el("div", { class: "legend", role: "group", "aria-label": `Lines of ${plot.title}` });
  const figure = old || el("figure");
  figure.replaceChildren(el("figcaption", { text: plot.title }), place, readout, legend);
  if (!figure.isConnected) $("plots").append(figure);
  const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { stroke: colour("--grid"), width: 1 } };
  const chart = new uPlot({
    width: Math.max(place.clientWidth, 200),
    height: HEIGHT,
    legend: { show: false },
    cursor: { drag: { x: true, y: false } },
    scales: { y: { range: (_, low, high) => [0, Math.max(1.05 * (high ?? 0), 1)] } },
    axes: [
      { ...axis, space: 80, values: (_, ticks, __, ___, apart) => ticks.map((t) => onAxis(t, apart)) },
      { ...axis, size: 60, values: (_, ticks) => ticks.map((value) => short(value, plot)) },
    ],
    series: [{}, ...lines.map(([name], at) => ({
      label: name, stroke: stroke(at), width: at ? 1 : 2, dash: at > COLOURS ? [6, 4] : undefined, points: { size: 4 },
    }))],
    hooks: { setCursor: [(shown) => tell(shown.cursor.idx)] },
  }, data, place);

  function tell(at) {
    const t = chart.data[0];
    const index = at ?? t.length - 1;
    const values = lines.map(([name], line) => [name, chart.data[line + 1][index]]);
    const words = values.filter(([, value]) => value !== null && value !== undefined).map(([name, value]) => `${name} ${plot.tell(value)}`);
    readout.textContent = t.length ? `${moment(t[index])} · ${words.join(" · ") || "nothing told"}` : "nothing yet";
    place.setAttribute("aria-label", `${plot.title}: ${readout.textContent}`);
  }

  let at = null;
  place.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !chart.data[0].length) return;
    event.preventDefault();
    at = Math.min(Math.max((at ?? chart.data[0].length - 1) + step, 0), chart.data[0].length - 1);
    chart.setCursor({ left: chart.valToPos(chart.data[0][at], "x"), top: 0 });
    tell(at);
  });
  place.addEventListener("focus", () => readout.setAttribute("aria-live", "polite"));
  place.addEventListener("blur", () => readout.removeAttribute("aria-live"));

  legend.append(...lines.map(([name], line) => {
    const swatch = el("span", { class: "swatch" });
    swatch.style.background = stroke(line);
    const button = el("button", { type: "button", "aria-pressed": "true" }, swatch, name);
    button.addEventListener("click", () => {
      const show = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(show));
      chart.setSeries(line + 1, { show });
    });
    return button;
  }));
  const resized = new ResizeObserver(() => place.clientWidth && chart.setSize({ width: place.clientWidth, height: HEIGHT }));
  resized.observe(place);
  return { names, chart, figure, tell, close: () => (resized.disconnect(), chart.destroy()) };
}

// Colours are the canvas's own: it is drawn anew where light turns to dark.
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  drawn.forEach((one) => (one.names = ""));
  if (columns) draw();
});
