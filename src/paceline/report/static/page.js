// Draws a page from the facts of one or several runs: embedded in a report, streamed to the live page.
"use strict";

const PARTS = ["computing", "loading", "communicating", "updating", "waiting", "cancelled", "elsewhere"];
const RUNS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#737373", "#a6761d", "#1b9e77"];
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
const NAMES = { elsewhere: "not training" };

const make = (tag, attributes = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), attributes);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
};
const number = (value, digits = 3) => {
  if (value === null || value === undefined) return "–";
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return Number(value.toPrecision(digits)).toString();
};
const share = (value) => value === null || value === undefined ? "–" : (100 * value).toFixed(value < 0.0995 ? 1 : 0) + " %";
const bytes = (value) => {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let n = 0;
  while (value >= 1000 && n < units.length - 1) { value /= 1000; n++; }
  return number(value) + " " + units[n];
};

class Plot {
  constructor(title, about) {
    this.box = make("div", { className: "plot" });
    this.card = make("div", { className: "card" }, make("h3", { textContent: title }), this.box, about ? make("div", { className: "small soft", textContent: about }) : null);
    this.card.dataset.figure = title;
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.last && this.draw(...this.last));
  }

  draw(traces, axes = {}) {
    this.last = [traces, axes];
    const axis = (own) => ({ gridcolor: css("line"), linecolor: css("line"), zerolinecolor: css("line"), automargin: true, ...own, title: { standoff: 8, ...(own || {}).title } });
    const layout = {
      margin: { l: 58, r: 14, t: 8, b: 44 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: css("ink"), family: "system-ui, sans-serif", size: 13 }, hovermode: "closest",
      legend: { orientation: "h", y: -0.24, yanchor: "top", traceorder: "normal" }, uirevision: "kept",
      ...axes, xaxis: axis(axes.xaxis), yaxis: axis(axes.yaxis),
    };
    Plotly.react(this.box, traces, layout, { responsive: true, displaylogo: false, displayModeBar: false });
  }
}

class Run {
  constructor(live) {
    this.live = live;
    this.head = make("div");
    this.workers = make("div", { className: "card scroll" });
    this.workers.dataset.figure = "workers";
    this.timelineBox = make("div");
    this.timelineCard = make("div", { className: "card" }, make("h3", { textContent: "Timeline" }), this.timelineBox);
    this.timelineCard.dataset.figure = "timeline";
    this.time = new Plot("Where the time goes", "Seconds of each worker.");
    this.blame = new Plot("Who was waited for", "Seconds that all workers together waited for each worker, by what it did meanwhile.");
    this.pace = new Plot("Own pace", "Milliseconds per minibatch; waiting for others is taken out.");
    this.throughput = new Plot("Throughput over time");
    this.throughputByUpdate = new Plot("Throughput over updates");
    this.metrics = new Plot("Metrics over time");
    this.byUpdate = new Plot("Metrics over updates");
    this.staleness = new Plot("Staleness", "How many gradients were how many versions old when they came.");
    this.traffic = new Plot("Bytes moved");
    this.grid = make("div", { className: "grid" }, ...[this.time, this.blame, this.pace, this.throughput, this.throughputByUpdate, this.metrics, this.byUpdate, this.staleness, this.traffic].map((plot) => plot.card));
    this.config = make("pre");
    this.sections = [this.head, this.timelineCard, this.workers, this.grid, make("details", {}, make("summary", { textContent: "Configuration" }), this.config)];
    for (const section of this.sections) section.classList.add("section");
  }

  update(run) {
    this.drawHead(run);
    this.drawWorkers(run);
    if (run.config.predicted) this.timelineCard.querySelector("h3").textContent = "Timeline (predicted)";
    if (this.timeline) this.timeline.update(run.timeline);
    else this.timeline = new Timeline(this.timelineBox, run.timeline, { follow: this.live ? 10 : 0 });
    this.drawShares(run);
    this.drawCurves(run);
    this.drawCounts(run);
    this.config.textContent = JSON.stringify(run.config, null, 2);
  }

  drawHead(run) {
    const numbers = [
      ["samples per second", number(run.samples_per_second)],
      ["per update", run.seconds_per_update === null ? "–" : duration(run.seconds_per_update)],
      ["updates", run.updates.toLocaleString("en")],
      ["bubbles (waiting)", share(run.bubbles)],
      ["scaling efficiency", share(run.efficiency)],
      ...(run.bubble ? [["pipeline bubble (formula)", `${share(run.bubble.measured)} (${run.bubble.formula === null ? "–" : share(run.bubble.formula)})`]] : []),
      ["duration", duration(run.seconds)],
      ...(run.startup ? [["start-up, before that", duration(run.startup)]] : []),
      ...(run.served ? [["mean staleness", number(run.staleness.mean)]] : []),
      ...Object.entries(run.last).map(([name, value]) => [name, number(value, 4)]),
    ];
    this.head.replaceChildren(
      ...run.notes.map((note) => make("div", { className: "note", textContent: note })),
      make("div", { className: "verdict", textContent: run.verdict.join(" ") }),
      make("div", { className: "numbers" }, ...numbers.map(([name, value]) => make("div", {}, make("b", { textContent: value }), make("span", { textContent: name })))),
    );
    this.head.querySelector(".numbers").title = "Scaling efficiency: samples per second, as a share of what the same workers would do if each just loaded and computed.";
  }

  drawWorkers(run) {
    const cancelled = run.workers.some((worker) => worker.cancelled);
    const heads = ["worker", ...(this.live ? ["state", "last heard of"] : []), "own pace", "× others", "slowest step", "minibatches", ...(cancelled ? ["cancelled"] : []), ...(run.served ? ["staleness"] : []), "waited for it", "why"];
    const rows = run.workers.map((worker) => {
      const cells = [
        String(worker.rank),
        ...(this.live ? [worker.state, heard(worker, run)] : []),
        worker.pace === null ? "–" : duration(worker.pace),
        worker.ratio.toFixed(2),
        duration(worker.longest),
        worker.minibatches.toLocaleString("en"),
        ...(cancelled ? [worker.cancelled.toLocaleString("en")] : []),
        ...(run.served ? [number(worker.staleness)] : []),
        worker.blame > 0 ? duration(worker.blame) : "–",
      ];
      const row = make("tr", { className: worker.slow ? "slow" : "" }, ...cells.map((cell) => make("td", { textContent: cell })));
      row.append(make("td", { className: "words", textContent: worker.slow ? run.causes[worker.why] || "mostly cancelled" : "" }));
      return row;
    });
    const table = make("table", {}, make("tr", {}, ...heads.map((head, n) => make("th", { textContent: head, className: n === heads.length - 1 ? "words" : "" }))), ...rows);
    this.workers.replaceChildren(make("h3", { textContent: "Who is slow" }), table);
  }

  drawShares(run) {
    const names = run.workers.map((worker) => "worker " + worker.rank);
    const bars = { barmode: "stack", yaxis: { autorange: "reversed", type: "category", title: undefined }, bargap: 0.35 };
    this.time.draw(PARTS.map((part) => ({
      type: "bar", orientation: "h", name: NAMES[part] || part, y: names, x: run.workers.map((worker) => worker.seconds[part]),
      marker: { color: css(part), line: { color: css("line"), width: part === "waiting" ? 1 : 0 } }, hovertemplate: "%{x:.3g} s<extra>" + (NAMES[part] || part) + "</extra>",
    })), { ...bars, xaxis: { title: { text: "seconds" } } });
    const causes = { loading: css("loading"), forward: css("computing"), backward: "#56b4e9", slowed: "#d55e00", link: css("communicating"), elsewhere: css("elsewhere") };
    this.blame.draw(Object.keys(run.causes).map((cause) => ({
      type: "bar", orientation: "h", name: cause === "slowed" ? "--slow" : cause, y: names, x: run.workers.map((worker) => worker.causes[cause]),
      marker: { color: causes[cause] }, hovertemplate: "%{x:.3g} s waited, for " + run.causes[cause] + "<extra></extra>",
    })), { ...bars, xaxis: { title: { text: "seconds waited for it" }, rangemode: "tozero" } });
    this.blame.card.hidden = !run.workers.some((worker) => worker.blame > 0);
    this.pace.draw(["loading", "forward", "backward", "slowed", "link"].map((part) => ({
      type: "bar", orientation: "h", name: part === "slowed" ? "--slow" : part, y: names, x: run.workers.map((worker) => 1e3 * worker.parts[part]),
      marker: { color: causes[part] }, hovertemplate: "%{x:.3g} ms<extra>" + part + "</extra>",
    })), { ...bars, xaxis: { title: { text: "ms per minibatch" }, rangemode: "tozero" } });
  }

  drawCurves(run) {
    const { throughput, metrics } = run.curves;
    for (const [plot, x, over] of [[this.throughput, throughput.seconds, "seconds"], [this.throughputByUpdate, throughput.versions, "updates"]]) {
      plot.draw([{ type: "scatter", mode: "lines", x, y: throughput.samples, line: { color: css("computing"), width: 2 }, name: "samples/s" }],
        { xaxis: { title: { text: over } }, yaxis: { title: { text: "samples per second" }, rangemode: "tozero" }, showlegend: false });
    }
    this.throughputByUpdate.card.hidden = !run.updates;
    const traces = (over) => Object.entries(metrics).map(([name, curve], n) => ({
      type: "scatter", mode: curve.values.length < 40 ? "lines+markers" : "lines", x: curve[over], y: curve.values, name, line: { color: RUNS[n % RUNS.length], dash: DASHES[n % DASHES.length], width: 2 }, marker: { size: 5 },
    }));
    this.metrics.draw(traces("seconds"), { xaxis: { title: { text: "seconds" } }, showlegend: true });
    this.byUpdate.draw(traces("updates"), { xaxis: { title: { text: "updates" } }, showlegend: true });
    for (const plot of [this.metrics, this.byUpdate]) plot.card.hidden = !Object.keys(metrics).length;
  }

  drawCounts(run) {
    const ages = Object.keys(run.staleness.histogram).map(Number).sort((a, b) => a - b);
    this.staleness.card.hidden = !ages.length;
    this.staleness.draw([{ type: "bar", x: ages, y: ages.map((age) => run.staleness.histogram[age]), marker: { color: css("computing") }, hovertemplate: "%{y} gradients of staleness %{x}<extra></extra>" }],
      { xaxis: { title: { text: "staleness (versions)" }, ...(ages.length < 20 ? { dtick: 1 } : {}) }, yaxis: { title: { text: "gradients" } }, showlegend: false, bargap: 0.15 });
    const kinds = [["read", "read from others' memory"], ["pushed", "pushed"], ["saved", "saved by compression"], ["sent", "sent in messages"]].filter(([key]) => run.bytes[key]);
    this.traffic.card.hidden = !kinds.length;
    const lanes = [...run.workers.map((worker) => ["worker " + worker.rank, worker.bytes]), ...run.servers.map((server) => [run.servers.length === 1 ? "server" : "server " + -server.rank, { read: server.read, pushed: 0, saved: 0, sent: 0 }])];
    const most = Math.max(1, ...lanes.flatMap(([, moved]) => kinds.map(([key]) => moved[key])));
    const power = Math.min(4, Math.floor(Math.log10(most) / 3)), unit = Math.pow(1000, power);
    this.traffic.draw(kinds.map(([key, name], n) => ({ type: "bar", orientation: "h", name, y: lanes.map(([lane]) => lane), x: lanes.map(([, moved]) => moved[key] / unit), marker: { color: RUNS[n] }, customdata: lanes.map(([, moved]) => bytes(moved[key])), hovertemplate: "%{customdata}<extra>" + name + "</extra>" })),
      { barmode: "stack", showlegend: true, yaxis: { autorange: "reversed", type: "category" }, xaxis: { title: { text: ["bytes", "kB", "MB", "GB", "TB"][power] }, rangemode: "tozero" } });
  }
}

const heard = (worker, run) => {
  const ago = run.now - worker.heard;
  return ago < 1.5 ? "just now" : duration(ago) + " ago";
};

function compare(runs, main) {
  const metric = ["loss", ...Object.keys(runs[0].last)].find((name) => runs.some((run) => run.curves.metrics[name]));
  const heads = ["run", "strategy", "workers", "samples/s", "× first", "per update", "computing", "waiting", "efficiency", "staleness", ...new Set(runs.flatMap((run) => Object.keys(run.last)))];
  const metrics = heads.slice(10);
  const rows = runs.map((run) => {
    const total = run.workers.reduce((sum, worker) => sum + PARTS.reduce((s, part) => s + worker.seconds[part], 0), 0) || 1;
    const computing = run.workers.reduce((sum, worker) => sum + worker.seconds.computing, 0);
    const ratio = run.samples_per_second && runs[0].samples_per_second ? (run.samples_per_second / runs[0].samples_per_second).toFixed(2) : "–";
    const cells = [run.name, run.strategy || "–", run.workers.length, number(run.samples_per_second), ratio, run.seconds_per_update === null ? "–" : duration(run.seconds_per_update), share(computing / total), share(run.bubbles), share(run.efficiency), run.served ? number(run.staleness.mean) : "–", ...metrics.map((name) => number(run.last[name], 4))];
    return make("tr", {}, ...cells.map((cell) => make("td", { textContent: cell })));
  });
  const table = make("div", { className: "card scroll section" }, make("h3", { textContent: "Side by side" }), make("table", {}, make("tr", {}, ...heads.map((head) => make("th", { textContent: head }))), ...rows));
  table.dataset.figure = "comparison";
  const plots = [new Plot("Throughput, side by side"), new Plot(`${metric || "loss"} against wall-clock`), new Plot(`${metric || "loss"} against updates`), new Plot("Where the time goes, side by side", "Shares of all workers' time.")];
  const line = (n) => ({ color: RUNS[n % RUNS.length], dash: DASHES[Math.floor(n / 2) % DASHES.length], width: 2 });
  const grid = make("div", { className: "grid section" }, ...plots.map((plot) => plot.card));
  main.append(table, grid);
  const names = runs.map((run) => run.name);
  const labels = names.map((name) => name.match(/.{1,26}(?:[,:\s]|$)|.{1,26}/g) || [name]);
  const lines = labels.length * Math.max(...labels.map((label) => label.length));
  if (lines > 12) for (const plot of [plots[0], plots[3]]) plot.box.style.height = `${140 + 18 * lines}px`;
  const sideways = { yaxis: { autorange: "reversed", type: "category", tickvals: names, ticktext: labels.map((label) => label.join("<br>")) }, bargap: 0.35 };
  plots[0].draw([{ type: "bar", orientation: "h", y: names, x: runs.map((run) => run.samples_per_second), marker: { color: names.map((_, n) => RUNS[n % RUNS.length]) }, hovertemplate: "%{x:.4g} samples/s<extra></extra>" }], { ...sideways, xaxis: { title: { text: "samples per second" } }, showlegend: false });
  for (const [plot, over, title] of [[plots[1], "seconds", "seconds"], [plots[2], "updates", "updates"]]) {
    plot.card.hidden = !metric;
    plot.box.style.height = "360px";
    if (metric) plot.draw(runs.map((run, n) => ({ type: "scatter", mode: "lines", name: run.name, x: (run.curves.metrics[metric] || { [over]: [] })[over], y: (run.curves.metrics[metric] || { values: [] }).values, line: line(n) })), { xaxis: { title: { text: title } }, yaxis: { title: { text: metric } } });
  }
  plots[3].draw(PARTS.map((part) => ({
    type: "bar", orientation: "h", name: NAMES[part] || part, y: names,
    x: runs.map((run) => { const total = run.workers.reduce((sum, worker) => sum + PARTS.reduce((s, p) => s + worker.seconds[p], 0), 0) || 1; return 100 * run.workers.reduce((sum, worker) => sum + worker.seconds[part], 0) / total; }),
    marker: { color: css(part), line: { color: css("line"), width: part === "waiting" ? 1 : 0 } }, hovertemplate: "%{x:.1f} %<extra>" + (NAMES[part] || part) + "</extra>",
  })), { ...sideways, barmode: "stack", xaxis: { title: { text: "% of the time" }, range: [0, 100] } });
}

function title(main, words, about) {
  main.append(make("h1", { textContent: words, className: "section" }), make("div", { className: "soft section", textContent: about }));
}

function about(run) {
  const when = run.started && !run.config.predicted ? new Date(run.started * 1000).toISOString().replace("T", " ").slice(0, 19) + " UTC" : "";
  return [run.config.predicted ? "PREDICTED by simulation, not measured" : "", run.strategy, `${run.workers.length} worker${run.workers.length === 1 ? "" : "s"}`, when].filter(Boolean).join(" · ");
}

function report(data) {
  const main = document.getElementById("page");
  const drawn = [];
  if (data.runs.length === 1) title(main, data.title, about(data.runs[0]));
  else { title(main, data.title, `${data.runs.length} runs`); compare(data.runs, main); }
  for (const facts of data.runs) {
    if (data.runs.length > 1) main.append(make("h2", { textContent: facts.name, className: "section" }), make("div", { className: "soft section", textContent: about(facts) }));
    const run = new Run(false);
    main.append(...run.sections);
    run.update(facts);
    drawn.push(run);
  }
  window.paceline = { runs: drawn, figures, show, ready: true };
}

let shown = [];


// For --png: the names of all figures, and one figure alone, with its height.
function figures() {
  const main = document.getElementById("page");
  main.style.maxWidth = "none";
  main.style.width = "1220px";
  main.style.padding = "20px";
  shown = [...document.querySelectorAll("[data-figure]")].filter((element) => !element.hidden);
  for (const figure of shown) figure.style.margin = "0";
  return shown.map((figure) => figure.dataset.figure);
}

async function show(number) {
  document.getElementById("page").replaceChildren(shown[number]);
  await Promise.all([...document.querySelectorAll(".plot")].map((plot) => Plotly.Plots.resize(plot)));
  for (const run of window.paceline.runs) run.timeline.draw();
  return Math.ceil(shown[number].getBoundingClientRect().height);
}

function live() {
  const main = document.getElementById("page");
  const state = make("span", { textContent: "connecting" }), dot = make("span", { className: "dot over" });
  const pause = make("button", { textContent: "pause the drawing" });
  const heading = make("h1", { textContent: "Paceline" }), line = make("div", { className: "soft" });
  main.append(heading, line, make("div", { className: "bar" }, make("span", {}, dot, state), pause));
  const run = new Run(true);
  main.append(...run.sections);
  let paused = false, newest = null, waiting = false;
  window.paceline = { runs: [run], messages: 0, drawings: 0, ready: false };
  const draw = () => {
    waiting = false;
    if (!newest || paused) return;
    heading.textContent = newest.name;
    line.textContent = about(newest);
    run.update(newest);
    window.paceline.drawings++;
    window.paceline.ready = true;
  };
  pause.addEventListener("click", () => { paused = !paused; pause.textContent = paused ? "go on drawing" : "pause the drawing"; draw(); });
  const source = new EventSource("stream" + location.search);
  source.addEventListener("facts", (event) => {
    newest = JSON.parse(event.data);
    window.paceline.messages++;
    state.textContent = newest.over ? "the run is over" : newest.read < 1 ? "reading the events so far: " + Math.round(100 * newest.read) + " %" : "live";
    dot.className = newest.over ? "dot over" : "dot";
    if (newest.over) source.close();
    // A page in the background does not draw; the next facts contain all it missed.
    if (!waiting && !document.hidden) { waiting = true; requestAnimationFrame(draw); }
  });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) draw(); });
  source.onerror = () => { if (!newest || !newest.over) { state.textContent = "no connection; trying again"; dot.className = "dot over"; } };
}
