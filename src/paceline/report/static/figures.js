// Bars and lines in SVG, as small as a report needs them: labels at the lines, words for screen readers, one tip for all.
"use strict";

const RUNS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#8c6bb1", "#737373", "#a6761d", "#1b9e77", "#e7298a", "#66a61e"];
const runColour = (n) => n < RUNS.length ? RUNS[n] : `hsl(${(n * 137.5) % 360} 55% 48%)`;
const SVG = "http://www.w3.org/2000/svg";

const make = (tag, attributes = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), attributes);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
};
const shape = (tag, attributes, ...children) => {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null && value !== undefined) element.setAttribute(name, value);
  element.append(...children);
  return element;
};
const number = (value, digits = 3) => {
  if (value === null || value === undefined) return "–";
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return Number(value.toPrecision(digits)).toString();
};
const pen = document.createElement("canvas").getContext("2d");
const widthOf = (words) => { pen.font = "13px system-ui, sans-serif"; return pen.measureText(words).width; };

// Means over a window that grows with the curve, so that a noisy loss shows its course.
function smoothed(values) {
  const half = Math.floor(values.length / 16);
  if (half < 1) return values;
  const sums = [0];
  for (const value of values) sums.push(sums[sums.length - 1] + value);
  return values.map((_, n) => {
    const reach = Math.min(half, n, values.length - 1 - n);
    return (sums[n + reach + 1] - sums[n - reach]) / (2 * reach + 1);
  });
}

function tell(event, words) {
  const tip = document.getElementById("tip");
  tip.hidden = !words;
  if (!words) return;
  tip.textContent = words;
  tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
}

class Plot {
  constructor(title, about, level = 2) {
    this.box = make("div", { className: "plot" });
    this.heading = make("h" + level, { textContent: title });
    this.card = make("div", { className: "card" }, this.heading, this.box, about ? make("div", { className: "small soft", textContent: about }) : null);
    this.card.dataset.figure = title;
    this.log = false;
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.again());
    new ResizeObserver(() => this.box.clientWidth !== this.width && this.again()).observe(this.box);
  }

  again() { if (this.last) this.draw(...this.last); }

  // A switch between a linear and a logarithmic axis of values.
  offerLog() {
    const button = make("button", { textContent: "log axis", className: "switch" });
    button.setAttribute("aria-pressed", "false");
    button.addEventListener("click", () => { this.log = !this.log; button.setAttribute("aria-pressed", String(this.log)); this.again(); });
    this.heading.after(button);
  }

  // traces: {bars: "across" | "up", name, keys, values, colour (one or a list), tips, workers} or {xs, ys, raw, name, colour, dash}.
  draw(traces, options = {}) {
    this.last = [traces, options];
    this.data = traces;
    this.width = this.box.checkVisibility() ? this.box.clientWidth : 0;
    if (!this.width) return;  // folded: drawn when it is opened
    this.box.replaceChildren();
    const height = this.box.clientHeight, legend = options.legend === false ? [] : traces.filter((trace) => trace.name);
    this.svg = shape("svg", { width: this.width, height, role: "img", "aria-label": options.words || this.card.dataset.figure });
    this.box.append(this.svg);
    const rows = this.legend(legend, height);
    const bottom = height - 42 - 19 * rows;
    if (!traces.length || (traces[0].bars && !traces[0].keys.length)) return;
    if (traces[0].bars === "across") this.across(traces, options, bottom);
    else if (traces[0].bars) this.up(traces[0], options, bottom);
    else this.lines(traces, options, bottom);
  }

  legend(traces, height) {
    const places = [];
    let x = 8, row = 0;
    for (const trace of traces) {
      const wide = 26 + widthOf(trace.name);
      if (x + wide > this.width - 4 && x > 8) { x = 8; row++; }
      places.push([trace, x, row]);
      x += wide + 12;
    }
    const rows = traces.length ? row + 1 : 0;
    for (const [trace, left, line] of places) {
      const y = height - 19 * (rows - line) + 9;
      const colour = Array.isArray(trace.colour) ? trace.colour[0] : trace.colour;
      this.svg.append(shape("rect", { x: left, y: y - 6, width: 18, height: 10, fill: colour, stroke: trace.edge || "none" }), this.text(left + 24, y, trace.name, "legendtext"));
    }
    return rows;
  }

  text(x, y, words, name, anchor = "start") {
    const text = shape("text", { x, y, class: name, "text-anchor": anchor, "dominant-baseline": "middle" });
    text.textContent = words;
    return text;
  }

  // An axis of values below; returns the place of a value.
  below(from, to, left, right, bottom, title) {
    const at = (value) => left + (value - from) / (to - from || 1) * (right - left);
    const [list] = ticks(from, to, Math.max(2, (right - left) / 90));
    const group = shape("g", { class: "xaxis" });
    let taken = -Infinity;
    for (const value of list) {
      const words = number(value, 6), half = widthOf(words) / 2;
      group.append(shape("line", { x1: at(value), x2: at(value), y1: 6, y2: bottom, class: "gridline" }));
      if (at(value) - half < Math.max(taken + 8, 1) || at(value) + half > this.width - 1) continue;
      group.append(shape("g", { class: "xtick" }, this.text(at(value), bottom + 12, words, "", "middle")));
      taken = at(value) + half;
    }
    if (title) group.append(this.text((left + right) / 2, bottom + 31, title, "xtitle", "middle"));
    this.svg.append(group);
    return at;
  }

  across(traces, options, bottom) {
    const keys = traces[0].keys, most = Math.min(this.width * 0.42, 220);
    const labels = keys.map((key) => { let words = String(key); while (words.length > 4 && widthOf(words) > most) words = words.slice(0, -2) + "…"; return words; });
    const left = 14 + Math.max(...labels.map(widthOf)), right = this.width - 14;
    const totals = keys.map((_, n) => traces.reduce((sum, trace) => sum + (trace.values[n] || 0), 0));
    const at = this.below(0, options.most || Math.max(...totals) * 1.03 || 1, left, right, bottom, options.x);
    const each = (bottom - 8) / keys.length, thick = Math.min(26, each * 0.68);
    labels.forEach((words, n) => {
      const label = shape("g", { class: "ytick" }, this.text(left - 8, 8 + each * (n + 0.5), words, "", "end"));
      label.append(shape("title", {}, String(keys[n])));
      this.svg.append(label);
    });
    const layer = shape("g", { class: "barlayer" }), before = keys.map(() => 0);
    for (const trace of traces) {
      const group = shape("g", { class: "trace bars" });
      keys.forEach((key, n) => {
        const value = trace.values[n] || 0, x = at(before[n]), wide = at(before[n] + value) - x, y = 8 + each * (n + 0.5) - thick / 2;
        before[n] += value;
        const path = shape("path", { d: `M${x},${y}h${wide}v${thick}h${-wide}Z`, fill: Array.isArray(trace.colour) ? trace.colour[n] : trace.colour, stroke: trace.edge || "none" });
        const point = shape("g", { class: "point" }, path);
        if (trace.workers) point.dataset.worker = trace.workers[n];
        point.addEventListener("pointermove", (event) => tell(event, trace.tips ? trace.tips[n] : `${number(value, 4)}`));
        point.addEventListener("pointerleave", (event) => tell(event, null));
        group.append(point);
      });
      layer.append(group);
    }
    this.svg.append(layer);
  }

  // An axis of values at the left; returns the place of a value and the left end of the plot.
  beside(low, high, bottom, title, log) {
    const power = (value) => log ? Math.log10(value) : value;
    const from = power(low), to = power(high);
    const y = (value) => bottom - (power(value) - from) / (to - from || 1) * (bottom - 10);
    let list = ticks(from, to, Math.max(2, bottom / 45))[0];
    if (log) list = list.map((value) => Math.pow(10, value));
    const words = list.map((value) => number(value, log ? 2 : 6));
    const left = 34 + Math.max(0, ...words.map(widthOf));
    const group = shape("g", { class: "yaxis" });
    list.forEach((value, n) => group.append(
      shape("line", { x1: left, x2: this.width, y1: y(value), y2: y(value), class: "gridline" }),
      shape("g", { class: "ytick" }, this.text(left - 8, y(value), words[n], "", "end")),
    ));
    const side = this.text(10, bottom / 2, title || "", "ytitle", "middle");
    side.setAttribute("transform", `rotate(-90 10 ${bottom / 2})`);
    group.append(side);
    this.svg.append(group);
    return [y, left];
  }

  up(trace, options, bottom) {
    const [y, left] = this.beside(0, Math.max(...trace.values) * 1.05 || 1, bottom, options.y, false);
    const right = this.width - 10, first = Math.min(...trace.keys), last = Math.max(...trace.keys);
    const at = this.below(first - 0.6, last + 0.6, left, right, bottom, options.x);
    const wide = Math.max(1, (at(first + 1) - at(first)) * 0.85);
    const group = shape("g", { class: "trace bars" });
    trace.keys.forEach((key, n) => {
      const point = shape("g", { class: "point" }, shape("path", { d: `M${at(key) - wide / 2},${bottom}h${wide}V${y(trace.values[n])}h${-wide}Z`, fill: trace.colour }));
      point.addEventListener("pointermove", (event) => tell(event, trace.tips[n]));
      point.addEventListener("pointerleave", (event) => tell(event, null));
      group.append(point);
    });
    this.svg.append(shape("g", { class: "barlayer" }, group));
  }

  lines(traces, options, bottom) {
    const drawn = traces.filter((trace) => trace.xs.length);
    const log = this.log && drawn.every((trace) => trace.ys.every((value) => value > 0));
    const values = drawn.flatMap((trace) => trace.ys), places = drawn.flatMap((trace) => trace.xs);
    if (!values.length) return;
    const extreme = (list, best) => list.reduce((a, b) => best(a, b));
    let low = options.zero && !log ? 0 : extreme(values, Math.min), high = extreme(values, Math.max);
    if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - 1, high + 1];
    const margin = log ? 0 : (high - low) * 0.04;
    const [y, left] = this.beside(options.zero && !log ? 0 : low - margin, high + margin, bottom, options.y, log);
    const named = options.labels && drawn.length > 1, wide = named ? Math.min(this.width * 0.3, 12 + Math.max(...drawn.map((trace) => widthOf(trace.name)))) : 6;
    const first = extreme(places, Math.min), last = extreme(places, Math.max);
    const at = this.below(first, last > first ? last : first + 1, left, this.width - wide - 4, bottom, options.x);
    const layer = shape("g", { class: "scatterlayer" }), ends = [];
    for (const trace of drawn) {
      const path = (list) => "M" + trace.xs.map((x, n) => `${at(x).toFixed(1)},${y(list[n]).toFixed(1)}`).join("L");
      const smooth = trace.smooth ? smoothed(trace.ys) : trace.ys;
      if (smooth !== trace.ys) layer.append(shape("path", { d: path(trace.ys), class: "raw", stroke: trace.colour }));
      const line = shape("path", { d: path(smooth), class: "js-line", stroke: trace.colour, "stroke-dasharray": trace.dash });
      line.addEventListener("pointermove", (event) => tell(event, `${trace.name}: ${number(smooth[this.nearest(trace, at, event)], 4)}`));
      line.addEventListener("pointerleave", (event) => tell(event, null));
      layer.append(line);
      ends.push([y(smooth[smooth.length - 1]), at(trace.xs[trace.xs.length - 1]), trace]);
    }
    this.svg.append(layer);
    if (named) this.label(ends, bottom, wide);
  }

  nearest(trace, at, event) {
    const x = event.clientX - this.svg.getBoundingClientRect().left;
    return trace.xs.reduce((best, value, n) => Math.abs(at(value) - x) < Math.abs(at(trace.xs[best]) - x) ? n : best, 0);
  }

  // Names at the ends of lines, moved apart where lines end close to each other.
  label(ends, bottom, wide) {
    ends.sort((a, b) => a[0] - b[0]);
    const gap = Math.min(16, (bottom - 8) / ends.length);
    const places = ends.map(([y]) => y);
    for (let n = 1; n < places.length; n++) places[n] = Math.max(places[n], places[n - 1] + gap);
    const over = Math.max(0, places[places.length - 1] - bottom);
    if (over) for (let n = places.length - 1, limit = bottom; n >= 0; n--, limit -= gap) places[n] = Math.min(places[n], limit);
    ends.forEach(([y, x, trace], n) => {
      let words = trace.name;
      while (words.length > 4 && widthOf(words) > wide - 8) words = words.slice(0, -2) + "…";
      const left = this.width - wide + 4;
      const text = this.text(left, places[n], words, "linelabel");
      text.setAttribute("fill", trace.colour);
      text.append(shape("title", {}, trace.name));
      this.svg.append(shape("path", { d: `M${x},${y}L${left - 3},${places[n]}`, class: "raw", stroke: trace.colour }), text);
    });
  }
}
